"""A child process as a backend."""

from tests.rigs.children import said, text, wrapped
from tests.rigs.server import PLAIN


async def test_a_call_passes_as_it_is() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        given = await talker.request(1, "tools/call", name="echo", arguments={"a": [1, None]})
        assert said(given) == {"a": [1, None]}


async def test_a_child_that_dies_ends_its_calls() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        error = await talker.request(1, "tools/call", name="leave", arguments={"code": 5})
        assert error["code"] == -32603
        assert error["data"] == {
            "reason": "interrupted",
            "exitCode": 5,
            "stderrTail": "last words\n",
        }
        assert text(await talker.request(2, "tools/call", name="echo")) == "{}"
