"""The listeners to the engine of a process, as its options want them.

Each observer is made before the engine, so that it hears of the calls that a restart interrupts.
"""

import trio

from streams.admin.endpoint import Route
from streams.admin.metrics import metrics_route
from streams.engine.events import Events
from streams.journal.contract import Journal
from streams.observe.registry import Registry
from streams.observe.tallies import Renderer, Tallies
from streams.process.loading import Hosted, Servable
from streams.process.log import call_log
from streams.process.options import Options
from streams.server.running import RunningServer


class Observers:
    """The observers of one process."""

    def __init__(self, server: Servable, options: Options) -> None:
        self.events = Events()
        self.calls = call_log(options, self.events)
        self.tallies: Tallies | None = None
        self._child_counts = server.child_counts if isinstance(server, Hosted) else None
        if options.admin is not None:
            self.tallies = Tallies(are_names_ours=not isinstance(server, Hosted))
            self.events.listen(self.tallies.hear)

    def watch(
        self, running: RunningServer, journal: Journal, registry: Registry, nursery: trio.Nursery
    ) -> list[Route]:
        """Watch a server that runs, in tasks of `nursery`; returns what operators may ask for."""
        if self.tallies is None:
            return []
        self.tallies.listen(running.engine)
        nursery.start_soon(self.tallies.run)
        return [metrics_route(self._renderer(running, journal, registry, self.tallies))]

    def _renderer(
        self, running: RunningServer, journal: Journal, registry: Registry, tallies: Tallies
    ) -> Renderer | None:
        try:
            from streams.observe.metrics import Metrics  # noqa: PLC0415  # takes time to load
        except ImportError as error:
            if error.name != "prometheus_client":
                raise
            return None
        metrics = Metrics(
            running.engine,
            journal,
            registry,
            tallies,
            bytes_max=0 if journal.replica else running.limits.journal_bytes_max,
            child_counts=self._child_counts,
        )
        return metrics.render
