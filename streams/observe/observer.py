"""The log of calls and the metrics of one server, for a program that runs the server itself.

`mcp-streams serve` puts the same parts together from its options (`streams.process.observers`).
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, get_args

import trio

from streams.engine.engine import Engine
from streams.engine.events import Events
from streams.limits import Limits, LogFormat
from streams.logs import STANDARD_ERROR
from streams.observe.calls import CallLog
from streams.observe.registry import Registry
from streams.observe.tallies import ChildCounts, Renderer, Tallies

if TYPE_CHECKING:
    from streams.observe.metrics import Metrics

NOT_INSTALLED: Final = "Metrics need prometheus-client: pip install 'mcp-streams[metrics]'."


class Running(Protocol):
    """The part of a `streams.server.running.RunningServer` that is observed."""

    engine: Engine
    limits: Limits


_Running = TypeVar("_Running", bound=Running)


class Observer:
    """Tells operators of one server, in a program that runs `Server.open` itself.

    With `log_calls` standard error gets the lines of calls, as text or as JSON. With `metrics` the
    server is counted for Prometheus, which needs `mcp-streams[metrics]`: raises `ImportError`
    without it. Without either nothing is observed.

    Give `events` to `Server.open`, and what that returns to `watch`. An observer is for one server,
    once.
    """

    def __init__(self, *, log_calls: LogFormat | None = None, metrics: bool = False) -> None:
        if log_calls not in (None, *get_args(LogFormat)):
            raise ValueError(f"log_calls {log_calls!r}: write 'text', 'json' or None")
        self.events = Events()
        self._calls: CallLog | None = None
        self._tallies: Tallies | None = None
        self._render: Renderer | None = None
        if log_calls is not None:
            self._calls = CallLog(as_json=log_calls == "json")
            self._calls.listen_to(self.events)
        if metrics:
            self._tallies = Tallies()
            _metrics_class()
            self._tallies.listen_to(self.events)

    @asynccontextmanager
    async def watch(
        self, opening: AbstractAsyncContextManager[_Running]
    ) -> AsyncIterator[_Running]:
        """Enter `server.open(…, events=observer.events)`, and observe it for as long.

        Raises `ValueError` where that has other events.
        """
        try:
            async with opening as running:
                if running.engine.events is not self.events:
                    raise ValueError("watch: open the server with events=observer.events")
                async with trio.open_nursery() as nursery:
                    self._start(running, nursery)
                    yield running
                    nursery.cancel_scope.cancel()
        finally:
            self._render = None
            STANDARD_ERROR.write_waiting()  # the lines of the shutdown

    def _start(self, running: Running, nursery: trio.Nursery) -> None:
        if self._calls is not None:
            nursery.start_soon(self._calls.run)
        if self._tallies is not None:
            self._tallies.measure(running.engine)
            nursery.start_soon(self._tallies.run)
            self._render = renderer_of(running, self._tallies)

    async def metrics(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics and their media type, for a request with this `Accept`.

        Raises `RuntimeError` without the setting `metrics`, and while the server does not run.
        """
        if self._tallies is None:
            raise RuntimeError("this server has no metrics: set metrics=True")
        if self._render is None:
            raise RuntimeError("the server does not run, so it has no metrics")
        return await self._render(accept)


def renderer_of(
    running: Running,
    tallies: Tallies,
    *,
    registry: Registry | None = None,
    child_counts: ChildCounts | None = None,
) -> Renderer:
    """Renders the metrics of a server. Raises `ImportError` without prometheus-client."""
    engine = running.engine
    journal = engine.journal
    metrics = _metrics_class()(
        engine,
        journal,
        registry or Registry(journal, engine),
        tallies,
        bytes_max=0 if journal.replica else running.limits.journal_bytes_max,
        child_counts=child_counts,
    )
    return metrics.render


def _metrics_class() -> "type[Metrics]":
    """Raises `ImportError` without prometheus-client."""
    try:
        from streams.observe.metrics import Metrics  # noqa: PLC0415  # optional, and slow to load
    except ImportError as error:
        if error.name != "prometheus_client":
            raise
        raise ImportError(NOT_INSTALLED, name=error.name) from None
    return Metrics
