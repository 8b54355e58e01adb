"""The endpoint for operators, `--admin HOST:PORT`: whether the process lives and is ready.

    /health/live     200 while the process runs its event loop
    /health/ready    200 while it serves clients; else 503 and the reason, in one line

Balancers and Kubernetes ask for these. They need no credentials, and have no secrets. It is a
listener of its own, so that clients cannot reach it and cannot fill it.
"""

from collections.abc import Callable
from typing import Final

from streams.exchange import Endpoint, Headers, Request, Responder

LIVE_PATH: Final = "/health/live"
READY_PATH: Final = "/health/ready"
CONNECTIONS_MAX: Final = 64  # a balancer has one or two; descriptors are for clients
BODY_BYTES_MAX: Final = 1024  # a body is read and dropped
LOOPBACK: Final = "127.0.0.1"

_HEADERS: Final[Headers] = (
    ("content-type", "text/plain; charset=utf-8"),
    ("cache-control", "no-store"),
)
_ALLOW: Final[Headers] = (("allow", "GET, HEAD"),)


class Health:
    """Whether a process is ready for clients, and why it is not.

    `why_not` returns the reason of the server that runs, or "".
    """

    def __init__(self) -> None:
        self.why_not: Callable[[], str] = lambda: "starting"
        self._is_stopping = False

    def stop(self) -> None:
        """From now on it is not ready: call this before anything of a shutdown."""
        self._is_stopping = True

    @property
    def unready(self) -> str:
        """Why the process is not ready, in one line; "" if it is."""
        return "shutting down" if self._is_stopping else " ".join(self.why_not().split())


def admin_endpoint(health: Health) -> Endpoint:
    """The endpoint of the listener for operators."""

    async def answer(request: Request, responder: Responder) -> None:
        status, text, more = _answer(request.method, request.path, health)
        await responder.respond(status, (*_HEADERS, *more), f"{text}\n".encode())

    return answer


def _answer(method: str, path: str, health: Health) -> tuple[int, str, Headers]:
    if path not in (LIVE_PATH, READY_PATH):
        return 404, f"There are {LIVE_PATH} and {READY_PATH}.", ()
    if method not in ("GET", "HEAD"):
        return 405, "Ask with GET or HEAD.", _ALLOW
    if path == LIVE_PATH or not health.unready:
        return 200, "ok", ()
    return 503, health.unready, ()


def admin_address(address: str) -> str:
    """`HOST:PORT`; a port alone is one of loopback."""
    port = address.removeprefix(":")
    return f"{LOOPBACK}:{port}" if port.isdecimal() else address
