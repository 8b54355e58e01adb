"""The listeners to the engine of a process, as its options want them.

Each observer is made before the engine, so that it hears of the calls that a restart interrupts.
"""

from collections.abc import Sequence

import trio

from streams.admin.changes import Changes
from streams.admin.endpoint import Route
from streams.admin.gate import TokenGate
from streams.admin.metrics import metrics_route
from streams.engine.events import CALL_KINDS, Events
from streams.observe.history import History
from streams.observe.observer import renderer_of
from streams.observe.registry import Registry
from streams.observe.tallies import Renderer, Tallies
from streams.process.loading import Hosted, Servable
from streams.process.log import call_log
from streams.process.options import Options
from streams.process.telemetry import trace_calls
from streams.server.running import RunningServer


class Observers:
    """The observers of one process."""

    def __init__(self, server: Servable, options: Options) -> None:
        self.events = Events()
        self.calls = call_log(options, self.events)
        self.tallies: Tallies | None = None
        self.history: History | None = None
        if options.otel:
            trace_calls(self.events, are_names_ours=not isinstance(server, Hosted))
        self._child_counts = server.child_counts if isinstance(server, Hosted) else None
        if options.admin is not None:
            self.tallies = Tallies(are_names_ours=not isinstance(server, Hosted))
            self.tallies.listen_to(self.events)
            self.history = History(self.tallies)
            self.events.listen(self.history.hear, CALL_KINDS)

    def watch(
        self, running: RunningServer, registry: Registry, nursery: trio.Nursery
    ) -> list[Route]:
        """Watch a server that runs, in tasks of `nursery`; returns what operators may ask for."""
        if self.tallies is None:
            return []
        self.tallies.measure(running.engine)
        nursery.start_soon(self.tallies.run)
        return [metrics_route(self._renderer(running, registry, self.tallies))]

    def page(
        self, running: RunningServer, registry: Registry, gate: TokenGate, nursery: trio.Nursery
    ) -> Sequence[Route]:
        """The operator's page, with a task of `nursery` that keeps the recent past."""
        if self.history is None:
            return ()
        # Imported here (PLC0415): only a server with --admin has the page.
        from streams.admin.page.routes import LivePage  # noqa: PLC0415

        page = LivePage(registry, self.history, gate, Changes(registry, running.engine))
        self.events.listen(page.hear, CALL_KINDS)
        nursery.start_soon(self.history.run, registry.live)
        return page.routes

    def _renderer(
        self, running: RunningServer, registry: Registry, tallies: Tallies
    ) -> Renderer | None:
        try:
            return renderer_of(running, tallies, registry=registry, child_counts=self._child_counts)
        except ImportError as error:
            if error.name != "prometheus_client":
                raise
            return None
