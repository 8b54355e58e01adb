"""Whether the process lives and is ready, for balancers and Kubernetes.

    /health/live     200 while the process runs its event loop
    /health/ready    200 while it serves clients; else 503 and the reason, in one line
    /health/ready?draining=404    the same, but 404 while it shuts down

HAProxy closes the connections of a server that answers 503. With `http-check disable-on-404` it
leaves them to a server that answers 404, which ends them in good order, and sends it no new ones.

They need no credentials, and have no secrets.
"""

from collections.abc import Callable
from typing import Final, Literal

import msgspec

from streams.admin.endpoint import NO_STORE, Route, query_of
from streams.exchange import Headers, Request, Responder

LIVE_PATH: Final = "/health/live"
READY_PATH: Final = "/health/ready"

_HEADERS: Final[Headers] = (("content-type", "text/plain; charset=utf-8"), NO_STORE)


class _Asked(msgspec.Struct):
    draining: Literal[404, 503] = 503


class Health:
    """Whether a process is ready for clients, and why it is not.

    `why_not` returns the reason of the server that runs, or "".
    """

    def __init__(self) -> None:
        self.why_not: Callable[[], str] = lambda: "starting"
        self.is_draining = False

    def drain(self) -> None:
        """From now on it is not ready: call this before anything of a shutdown."""
        self.is_draining = True

    @property
    def unready(self) -> str:
        """Why the process is not ready, in one line; "" if it is."""
        return "shutting down" if self.is_draining else " ".join(self.why_not().split())


def health_routes(health: Health) -> tuple[Route, ...]:
    """The routes of balancers."""

    async def live(_: Request, responder: Responder) -> None:
        await _say(responder, 200, "ok")

    async def ready(request: Request, responder: Responder) -> None:
        asked = query_of(request, _Asked)
        unready = asked.draining if health.is_draining else 503
        await _say(responder, unready if health.unready else 200, health.unready or "ok")

    return (Route("GET", LIVE_PATH, live, "open"), Route("GET", READY_PATH, ready, "open"))


async def _say(responder: Responder, status: int, text: str) -> None:
    await responder.respond(status, _HEADERS, f"{text}\n".encode())
