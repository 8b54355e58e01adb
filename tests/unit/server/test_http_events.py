"""Runs as server-sent events, for any number of messages in a run."""

import pytest

from streams.messages import Run
from streams.server.http.events import Events


def events(run: Run, *, is_announced: bool, suffix: str = "") -> list[bytes]:
    framing = Events()
    framing.identify(b"key_%d" + suffix.encode() if is_announced else b"")
    return b"".join(framing.run("stream", run, is_last=False)).splitlines(keepends=True)


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_every_message_is_an_event_with_its_number(count: int) -> None:
    lines = [b'{"n":%d,"share":"100%%d"}\n' % number for number in range(count)]
    run = Run(98, count, b"".join(lines))
    for suffix, end in (("", b""), ("_delivery", b"_delivery")):
        numbers = [b"id: key_%d%b\n" % (98 + place, end) for place in range(count)]
        found = events(run, is_announced=True, suffix=suffix)
        assert found[0::3] == numbers
        assert found[1::3] == [b"data: " + line for line in lines]
        assert found[2::3] == [b"\n"] * count
    bare = events(run, is_announced=False)
    assert bare[0::2] == [b"data: " + line for line in lines]
    assert bare[1::2] == [b"\n"] * count
