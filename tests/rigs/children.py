"""A child behind a server, for tests: the naughty one unless a test says otherwise."""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import trio

from streams.backends.child import ChildBackend, ChildSettings
from streams.journal.contract import Journal
from streams.journal.memory import MemoryJournal
from streams.keys import Keyring
from streams.limits import Limits
from streams.server.running import open_backend
from tests.rigs.server import House, Json

NAUGHTY: Final = str(Path(__file__).parent / "naughty.py")
PATIENCE_S: Final = 60  # a bound for a test that hangs


def settings(**given: Any) -> ChildSettings:
    """Settings of the naughty child. `env` has the names without their prefix, in small letters."""
    env = {f"NAUGHTY_{name.upper()}": str(value) for name, value in given.pop("does", {}).items()}
    command = (sys.executable, "-I", "-S", NAUGHTY)
    return ChildSettings(**{"command": command, "env": env, "stop_timeout_s": 2.0} | given)


@asynccontextmanager
async def wrapped(
    given: ChildSettings | None = None,
    *,
    journal: Journal | None = None,
    limits: Limits | None = None,
    keyring: Keyring | None = None,
    **more: Any,
) -> AsyncIterator[tuple[House, ChildBackend]]:
    """A server in front of children, for the length of a block."""
    backend = ChildBackend(settings(**more) if given is None else given)
    journal = MemoryJournal() if journal is None else journal
    keyring = Keyring.load(None) if keyring is None else keyring
    with trio.fail_after(PATIENCE_S):
        async with (
            open_backend(backend, journal, keyring, limits) as running,
            trio.open_nursery() as nursery,
        ):
            yield House(running, journal, nursery), backend
            nursery.cancel_scope.cancel()


def said(answer: Json) -> Any:
    """The JSON in the text of a result."""
    return json.loads(answer["content"][0]["text"])


def text(answer: Json) -> str:
    """The text of a result."""
    found: str = answer["content"][0]["text"]
    return found
