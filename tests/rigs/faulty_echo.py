"""Servers whose tools make one mistake each, for the test of short calls."""

from benchmarks.numbered import FIRST, METHOD, params
from streams import Call, Server

stale = Server("stale", resume_min_s=0)
failing = Server("failing", resume_min_s=0)
mute = Server("mute", resume_min_s=0)
gapped = Server("gapped", resume_min_s=0)
chatty = Server("chatty", resume_min_s=0)


class _Last:
    text = "0"


@stale.tool(name="echo")
async def echo_the_last(text: str) -> str:
    """Return the text of the call before."""
    said, _Last.text = _Last.text, text
    return said


@failing.tool(name="echo")
async def echo_an_error(text: str) -> str:
    """Fail with the text."""
    raise ValueError(text)


@mute.tool(name="note")
async def note_nothing(call: Call, text: str) -> str:
    """Send no log message."""
    return text


@gapped.tool(name="pace")
async def pace_with_a_gap(call: Call, count: int, size: int, per_second: int) -> int:
    """Leave out the third message."""
    for number in (0, 1, 3):
        await call.notify(METHOD, params(FIRST + number, ""))
    return count


@chatty.tool(name="wait")
async def wait_and_talk(call: Call) -> None:
    """Send a second message."""
    await call.notify(METHOD, params(FIRST, ""))
    await call.notify(METHOD, params(FIRST + 1, ""))
