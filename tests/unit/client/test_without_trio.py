"""A program of another event loop is told what to do."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from streams import Client, Keyring, MemoryJournal, Server
from transports import dial


def server_open() -> Any:
    return Server("s").open(MemoryJournal(), Keyring.load(None))


def step(coroutine: Any) -> None:
    """A loop of its own kind."""
    coroutine.send(None)


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: Client(dial("http://127.0.0.1:1")), "from streams.aio import Client"),
        (lambda: Client(dial("ws://127.0.0.1:1")), "from streams.aio import Client"),
        (lambda: Client(Server("s")), "from streams.aio import Client"),
        (server_open, r"server\.asgi\(\)"),
    ],
)
@pytest.mark.parametrize("runs_asyncio", [True, False])
def test_one_sentence_says_what_to_do(
    make: Callable[[], AbstractAsyncContextManager[Any]], advice: str, runs_asyncio: bool
) -> None:
    async def enter() -> None:
        async with make():
            raise AssertionError("entered")

    said = rf"runs under trio, and this code does not: .*{advice}.*trio\.run\(main\)$"
    run = asyncio.run if runs_asyncio else step
    with pytest.raises(RuntimeError, match=said) as raised:
        run(enter())
    assert "\n" not in str(raised.value)
