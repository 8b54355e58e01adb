"""How many calls, messages and connections there are now: a pass over what the engine holds."""

from collections import Counter
from typing import Final

import msgspec
import trio

from streams.engine.engine import Engine
from streams.journal.records import Outcome

COUNTED_AT_ONCE: Final = 500  # streams, in about a millisecond


class Census(msgspec.Struct):
    """Counts at one time. A replica counts the streams that it owns, and its own connections."""

    resident: int = 0  # streams in memory
    live: int = 0  # calls that run
    unattended: int = 0  # of these, calls without a client
    pending_messages: int = 0  # not known to be with their clients
    pending_bytes: int = 0
    questions: int = 0
    connections: Counter[str] = msgspec.field(default_factory=Counter)  # by transport


async def census(engine: Engine) -> Census:
    """Count. Other tasks run meanwhile, so that the counts are not all of one moment."""
    counted = Census()
    for number, stream in enumerate(engine.streams, 1):
        state = stream.state
        counted.resident += 1
        if state.outcome is Outcome.LIVE:
            counted.live += 1
            counted.unattended += stream.delivery is None
            counted.questions += len(state.questions)
        if not state.is_tombstone:
            counted.pending_messages += state.last - state.delivered
            counted.pending_bytes += state.kept_bytes
        if number % COUNTED_AT_ONCE == 0:
            await trio.lowlevel.checkpoint()
    for number, connection in enumerate(engine.connections, 1):
        counted.connections[connection.transport or "other"] += 1
        if number % COUNTED_AT_ONCE == 0:
            await trio.lowlevel.checkpoint()
    return counted
