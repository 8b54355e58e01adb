"""What listens to the engine of a process, as its options want it.

Each observer is made before the engine, so that it hears of the calls that a restart interrupts.
"""

import trio

from streams.admin.changes import Changes
from streams.admin.endpoint import Route
from streams.admin.gate import TokenGate
from streams.admin.page.routes import LivePage
from streams.engine.events import Events
from streams.observe.history import History, Totals
from streams.observe.registry import Registry
from streams.process.options import Options
from streams.server.running import RunningServer


class Observers:
    """The observers of one process."""

    def __init__(self, options: Options) -> None:
        self.events = Events()
        self.history: History | None = None
        if options.admin is not None:
            self.history = History()
            self.events.listen(self.history.hear)

    def watch(
        self,
        running: RunningServer,
        registry: Registry,
        changes: Changes,
        nursery: trio.Nursery,
        gate: TokenGate,
    ) -> list[Route]:
        """Watch a server that runs, in tasks of `nursery`; returns what operators may ask for."""
        if self.history is None:
            return []
        page = LivePage(registry, self.history, gate, changes)
        self.events.listen(page.hear)
        nursery.start_soon(self.history.run, registry.live, lambda: Totals(0, 0, 0.0))
        return [*page.routes]
