"""`GET /metrics` of the operator's endpoint, for Prometheus."""

from typing import Final

from streams.admin.endpoint import NO_STORE, Route
from streams.errors import INTERNAL_ERROR, Refusal
from streams.exchange import HttpError, Request, Responder
from streams.observe.observer import NOT_INSTALLED
from streams.observe.tallies import Renderer

PATH: Final = "/metrics"


def metrics_route(render: Renderer | None) -> Route:
    """The route; without a renderer it answers that a package is missing."""

    async def answer(request: Request, responder: Responder) -> None:
        if render is None:
            raise HttpError(501, Refusal(INTERNAL_ERROR, NOT_INSTALLED))
        body, media_type = await render(request.headers.get("accept", ""))
        await responder.respond(200, (("content-type", media_type), NO_STORE), body)

    return Route("GET", PATH, answer)
