"""A journal with a past: streams that have ended, whose messages no client has fetched yet."""

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from benchmarks.numbered import lines_of
from benchmarks.scale import MAX_S, PRINCIPAL
from streams.journal.ownership import key_path
from streams.journal.records import Append, Change, Create, Evict, Outcome, Record
from streams.journal.sqlite import open_sqlite_journal
from streams.keys import Keyring, new_id
from streams.messages import Run, request

MESSAGE_BYTES: Final = 200
EACH_MAX: Final = 1_000  # messages of a stream: one run, which has at most 252 KiB
AT_ONCE: Final = 250  # streams in a commit: 50 MB
_CALL: Final = request(1, "tools/call", {"name": "fill", "arguments": {}}).rstrip()


async def write_history(path: Path, messages: int) -> None:
    """Write a journal of so many messages of 200 bytes, a thousand in each stream or fewer.

    It is as a server leaves it whose clients do not come back: no stream of it is in memory.
    """
    each = min(messages, EACH_MAX)
    streams = messages // each
    run = Run(1, each, b"".join(lines_of(each, MESSAGE_BYTES)))
    pairs = _streams(path, streams, run)
    async with open_sqlite_journal(path, durability="process") as journal:
        while changes := [change for some in islice(pairs, AT_ONCE) for change in some]:
            if any(await journal.commit(changes)):
                raise ValueError("the journal refused a stream")


def _streams(path: Path, count: int, run: Run) -> Iterator[list[Change]]:
    keyring, now = Keyring.load(key_path(path)), time.time()
    for number in range(1, count + 1):
        stream = new_id()
        record = Record(
            stream=stream,
            principal=PRINCIPAL,
            origin=_CALL,
            min_s=0.0,
            max_s=MAX_S,
            created_at=now,
            fence=1,
            is_announced=True,
            number=number,
        )
        yield [
            Create(record),
            Append(stream, 1, run, 0, 0, Outcome.COMPLETED, now),
            Evict(stream, 1, now + MAX_S, False, tuple(keyring.names(stream))),
        ]
