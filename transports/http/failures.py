"""Failures of a request that our listener and the ASGI app answer alike."""

import trio

from streams.errors import INTERNAL_ERROR, Refusal
from streams.exchange import HttpError


def incomplete() -> HttpError:
    """The refusal of a request of which only a part came."""
    return HttpError(408, "The request did not come whole in time: send it again.")


def failed() -> HttpError:
    """The answer to a request whose endpoint has failed."""
    return HttpError(500, Refusal(INTERNAL_ERROR, "The server failed: see its log."))


def is_hang_up(error: Exception) -> bool:
    """Whether an endpoint has failed only because the peer has hung up."""
    if isinstance(error, ExceptionGroup):
        return error.split(trio.BrokenResourceError)[1] is None
    return isinstance(error, trio.BrokenResourceError)
