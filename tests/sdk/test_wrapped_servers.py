"""Other people's servers behind `mcp-streams wrap`: clients cannot tell them from bare ones."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from streams.journal.ownership import owner_of
from tests.sdk import transcripts
from tests.sdk.stock import Node
from tests.sdk.transcripts import Conversation, Json
from tests.wire.process import CLI, wait_until

CLIENTS: Final = ("python", "typescript")
SERVERS: Final = ("everything", "memory", "filesystem", "sdk", "lowlevel")
TRANSPORTS: Final = ("stdio", "ws", "http")

_ADDRESS: Final = re.compile(r"(?:ws|http)://127\.0\.0\.1:\d+\S*")

# The installation of the servers has a bound of its own.
pytestmark = pytest.mark.timeout(240, func_only=True)


class Bench:
    """The servers, and what clients see of them bare."""

    def __init__(self, node: Node, folder: Path) -> None:
        self._node = node
        made = (
            transcripts.everything(node),
            transcripts.memory(node, folder),
            transcripts.filesystem(node, folder / "files"),
            transcripts.sdk_server(),
            transcripts.lowlevel(),
        )
        self.conversations = {each.name: each for each in made}
        self.bare = cache(self._bare)

    def _bare(self, client: str, server: str) -> Json:
        conversation = self.conversations[server]
        where = {"command": conversation.command, "environment": conversation.environment}
        return self.hold(client, conversation, where)

    def hold(self, client: str, conversation: Conversation, where: Json) -> Json:
        conversation.prepare()
        return transcripts.hold(client, self._node, conversation, where)

    def wrapped(self, client: str, server: str, transport: str, folder: Path) -> Json:
        conversation = self.conversations[server]
        with wrapped(conversation, transport, self._node, folder) as where:
            return self.hold(client, conversation, where)


@pytest.fixture(scope="module")
def bench(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(node, tmp_path_factory.mktemp("servers"))


@contextmanager
def wrapped(conversation: Conversation, transport: str, node: Node, folder: Path) -> Iterator[Json]:
    """Where a client finds the wrapped server."""
    journal = folder / "journal.db"
    command = [*CLI, "wrap", "--journal", str(journal)]
    child = ["--", *conversation.command]
    if transport == "stdio":
        try:
            yield {"command": [*command, *child], "environment": conversation.environment}
        finally:
            end_owner(journal)
        return
    log = folder / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [*command, f"--{transport}", "127.0.0.1:0", *child],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=host_environment(node) | dict(conversation.environment),
        )
    try:
        wait_until("the server listens", lambda: _ADDRESS.search(log.read_text()))
        found = _ADDRESS.search(log.read_text())
        assert found is not None
        yield {"url": found[0]}
        assert server.poll() is None, log.read_text()
    finally:
        server.terminate()
        server.wait(20)


def host_environment(node: Node) -> dict[str, str]:
    """The variables that the official clients give to a server."""
    names = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER")
    whole = node.environment()
    return {name: whole[name] for name in names if name in whole}


def end_owner(journal: Path) -> None:
    owner = owner_of(journal)
    if owner is not None:
        os.kill(owner, signal.SIGTERM)
        wait_until("the owner ends", lambda: owner_of(journal) is None)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_wrapped_server_is_as_the_bare_one(
    client: str, server: str, transport: str, bench: Bench, tmp_path: Path
) -> None:
    bare, wrapped = bench.bare(client, server), bench.wrapped(client, server, transport, tmp_path)
    for one, other in zip(bare["requests"], wrapped["requests"], strict=True):
        assert other == one
    for kind in ("questions", "notifications"):
        assert [each for each in bare[kind] if each not in wrapped[kind]] == []
        assert wrapped[kind] == bare[kind]


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_conversation_leaves_nothing_out(client: str, server: str, bench: Bench) -> None:
    transcript = bench.bare(client, server)
    tools = set[str]()
    for request in transcript["requests"]:
        is_answered = request.get("result") is not None or request.get("error") is not None
        assert is_answered or "progress" not in request, request  # one that was not cancelled
        if request["method"] == "tools/list" and request["result"]:
            tools |= {tool["name"] for tool in request["result"]["tools"]}
    assert tools
    assert tools <= bench.conversations[server].called
