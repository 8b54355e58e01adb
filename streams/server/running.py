"""A backend that runs over a journal, and serves connections."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import structlog  # noqa: F401  # see `streams.logs`: the first line would hold up all clients
import trio

from streams import messages
from streams.engine.connection import Session
from streams.engine.engine import Engine, open_engine
from streams.engine.events import Events
from streams.engine.hooks import Hooks
from streams.engine.posts import Notice
from streams.engine.streams import DEFERRAL_S
from streams.errors import JournalUnusable
from streams.exchange import Caller, Channel
from streams.journal.contract import Journal
from streams.keys import Keyring
from streams.limits import Limits
from streams.logs import log
from streams.messages import RequestId
from streams.server.backend import Backend
from streams.server.patience import Patience, PatienceSettings
from streams.server.peer import Guests, Peer


class RunningServer:
    """A server that runs. Pass its `serve` to a transport."""

    def __init__(self, backend: Backend, engine: Engine, limits: Limits) -> None:
        self.engine = engine
        self.limits = limits
        self._backend = backend
        self._guests = Guests(backend)
        self._trio = trio.lowlevel.current_trio_token()
        engine.on_cancelled = self._cancelled

    def _cancelled(self, session: Session, request_id: RequestId, reason: Any) -> None:
        """A client cancels a request, and another replica was told."""
        detaches = partial(self._guests.detaches, session, reason)
        self.engine.operations.cancel(session, request_id, reason, detaches=detaches)

    @property
    def running_tools(self) -> Sequence[str]:
        """The names of the tools whose calls have not ended."""
        return self._backend.running_tools

    async def drain(self, grace_s: float) -> None:
        """Take no new calls, let those that run end within `grace_s` seconds, and shut down.

        Calls that a restart continues are not waited for. A second `drain` can only end the first
        one earlier. `serve` ends its process then.
        """
        await self.engine.drain(grace_s)

    async def serve(self, channel: Channel) -> None:
        """Serve one connection until it ends."""
        try:
            async with self.engine.connect(channel) as connection:
                await self.peer(connection.session).run(connection)
        except* JournalUnusable:
            raise  # without its journal, the server can serve no connection
        except* Exception:
            # A failure here concerns one connection. The server goes on with the others.
            log.exception("a connection failed", principal=channel.principal[:12])

    def peer(self, session: Session, caller: Caller | None = None) -> Peer:
        """The conversation with one client; `caller` is that of one HTTP request."""
        return Peer(self._guests, self.engine, session, caller)

    async def notify_all(self, method: str, params: Any = None) -> None:
        """Send a notification to every client that is connected.

        Over HTTP it goes to clients with a standing stream (a GET). No client gets it later: it is
        not kept. Raises `TypeError` for params that are no object in JSON, `ValueError` for a
        notification above `message_bytes_max`.
        """
        await trio.lowlevel.checkpoint()
        line = messages.notification(method, messages.checked_params(params))
        limit = self.limits.message_bytes_max
        if len(line) > limit:
            raise ValueError(f"a notification of {len(line)} bytes, of which there may be {limit}")
        self.engine.tell_all(Notice(line))

    def tell(self, notice: Notice) -> None:
        """Notify clients, at all replicas. May be called from any thread."""
        tell = partial(self.engine.tell_all, notice)
        if trio.lowlevel.in_trio_run() and trio.lowlevel.current_trio_token() is self._trio:
            tell()
        else:
            with suppress(trio.RunFinishedError):
                self._trio.run_sync_soon(tell)


@asynccontextmanager
async def open_backend(
    backend: Backend,
    journal: Journal,
    keyring: Keyring,
    limits: Limits | None = None,
    *,
    enforce_min: bool = False,
    require_resume_token: bool = False,
    announce_after_s: float = DEFERRAL_S,
    patience: PatienceSettings | None = None,
    events: Events | None = None,
    hooks: Hooks | None = None,
) -> AsyncIterator[RunningServer]:
    """Take over the journal's streams and run a backend, for the length of a block.

    Leaving the block shuts the server down within 4 s. The settings are those of `Server`.
    `patience` is for clients that do not wait for long (`streams.server.patience`). `events` may
    have listeners already, which then hear of the calls that a restart has interrupted. `hooks`
    makes webhooks (`streams.webhooks`).
    """
    limits = limits or Limits()
    layer = None
    if patience is not None and patience.is_on:
        backend = layer = Patience(backend, patience)
    async with backend.running():
        engine = Engine(
            journal,
            keyring,
            limits,
            enforce_min=enforce_min,
            require_token=require_resume_token,
            restart_handler=backend.restart_handler,
            deferral_s=announce_after_s,
            events=events or Events(),
            hooks=hooks,
        )
        async with open_engine(engine):
            if layer is not None:
                layer.operations = engine.operations
            yield RunningServer(backend, engine, limits)
