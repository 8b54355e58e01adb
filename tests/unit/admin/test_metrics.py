"""Operators get the metrics, or are told what to install."""

import pytest

from streams.admin.metrics import metrics_route
from streams.exchange import Headers, HttpError, Request


class Answered:
    """A responder that keeps the response."""

    async def respond(self, status: int, headers: Headers = (), body: bytes = b"") -> None:
        self.status, self.headers, self.body = status, dict(headers), body


async def test_they_are_answered_in_the_format_that_was_asked_for() -> None:
    async def render(accept: str) -> tuple[bytes, str]:
        return b"a 1\n", accept

    route, answered = metrics_route(render), Answered()
    request = Request("GET", "/metrics", {"accept": "text/plain"}, b"")
    await route.answer(request, answered)
    assert (answered.status, answered.body) == (200, b"a 1\n")
    assert answered.headers["content-type"] == "text/plain"
    assert route.access == "read", "it needs the operator's token"


async def test_without_the_package_the_answer_says_what_to_install() -> None:
    route = metrics_route(None)
    with pytest.raises(HttpError, match=r"pip install 'mcp-streams\[metrics\]'") as refused:
        await route.answer(Request("GET", "/metrics", {}, b""), Answered())
    assert refused.value.status == 501
