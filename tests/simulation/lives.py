"""The lives of servers, and what holds for each of them."""

from collections.abc import Callable
from typing import Final

import trio

from streams.engine.engine import Engine
from streams.journal.records import Outcome
from streams.keys import Keyring
from tests.simulation.ledger import Ledger
from tests.simulation.world import Job, World

KEYRING: Final = Keyring([bytes(32)])


class Life:
    """One server, until it dies or stops."""

    def __init__(self, *, is_replica: bool = False) -> None:
        self.is_replica = is_replica
        self.scope = trio.CancelScope()
        self.is_dead = False
        self.is_over = trio.Event()  # it is dead, or has begun to stop
        self.is_gone = trio.Event()  # all its tasks have ended

    def over(self) -> None:
        """End this life: steps of its tools no longer count."""
        self.is_over.set()


def excuse(
    world: World, ledger: Ledger, is_there: Callable[[Job], bool] = lambda job: True
) -> None:
    """Allow the calls of a server whose end is not durable yet to end as interrupted."""
    outcomes = {known.job.key: known.outcome for known in ledger.known.values()}
    for job in world.jobs.values():
        # A call may have been made, and its tool may wait for the journal.
        is_called = job.runs or job.part.starts_at <= trio.current_time()
        if is_called and outcomes.get(job.key, Outcome.LIVE) is Outcome.LIVE and is_there(job):
            job.was_interrupted = True


def check_marks(world: World, engine: Engine) -> None:
    """Check that no mark is beyond the position of the reader that is attached."""
    for stream in engine._streams.index:
        if stream.delivery is not None:
            delivered, position = stream.state.delivered, stream.delivery.position
            world.expect(
                delivered <= position,
                f"{stream.id[:8]}: {delivered} are let go, and its reader is at {position}",
            )


def check_memory(world: World, ledger: Ledger, engine: Engine) -> None:
    """Check that no stream is left in memory that the journal does not have."""
    for stream in engine._streams.index:
        is_known = stream.id in ledger.known or stream.id in ledger.others
        world.expect(is_known, f"{stream.record.origin!r} is left in memory")
