"""Three replicas on one store: operators of each see all calls as they are, whoever runs them."""

import json
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from tests.rigs import ROOT
from tests.rigs.redis_servers import running
from tests.wire.process import ServerProcess, wait_until
from tests.wire.raw import DEADLINE_S, Peer
from tests.wire.verbs import POSITIONS, Started, called, start

APP: Final = f"{ROOT / 'tests/rigs/operated.py'}:server"
TOKEN: Final = "operators-" + "x" * 43
_URL: Final = re.compile(r"(http://127\.0\.0\.1:\d+)/health/ready")

Json = dict[str, Any]
Told = tuple[str, str, str]
"""How a replica tells of a call: its state, its owner, and where its client is."""


class Replica:
    """One of the servers, and what its operators are told."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        server.hear("/health/ready")
        self._url = next(filter(None, map(_URL.search, server.log)))[1]

    def fetched(self, path: str) -> str:
        request = urllib.request.Request(self._url + path)
        request.add_header("Authorization", f"Bearer {TOKEN}")
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return str(answer.read().decode())

    def calls(self, **query: str) -> dict[str, Json]:
        """The list, by id."""
        found = json.loads(self.fetched(f"/api/calls?{urllib.parse.urlencode(query)}"))
        return {each["id"]: each for each in found["calls"]}

    def told(self, call: Started) -> set[Told]:
        """How the list and the view of the call tell of it, one after the other."""
        shown = call.stream[:12]
        found = [self.calls()[shown], json.loads(self.fetched(f"/api/calls/{shown}"))]
        return {(each["state"], each["owner"], client_of(each)) for each in found}

    def row(self, call: Started) -> str:
        """The row of the live page."""
        row = re.search(rf'<tr id="call-{call.stream[:12]}".*?</tr>', self.fetched("/"), re.DOTALL)
        assert row is not None
        return row[0]

    @property
    def owned(self) -> set[str]:
        """The ids of the calls that it has in its memory."""
        return {each["id"] for each in self.calls().values() if each["isInMemory"]}


def client_of(call: Json) -> str:
    if call["connection"] is not None:
        return "here"
    return {True: "elsewhere", False: "away", None: "unknown"}[call["clientIsElsewhere"]]


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Replica]]:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    options = ("--admin=127.0.0.1:0", f"--admin-token-file={token}", "--lease=1")
    with ExitStack() as opened:
        store = opened.enter_context(running("redis", tmp_path / "store", "--appendonly", "yes"))
        found = []
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            server = ServerProcess(folder, app=APP, store=f"{store.url}/0", options=options)
            found.append(Replica(opened.enter_context(server)))
        yield found


@pytest.fixture
def peers(replicas: list[Replica]) -> Iterator[list[Peer]]:
    """A client at each."""
    with ExitStack() as opened:
        found = [opened.enter_context(each.server.connect("ws-streams")) for each in replicas]
        for peer in found:
            peer.initialize(POSITIONS)
        yield found


def agree(replicas: list[Replica], call: Started, *clients: str, state: str, owner: str) -> None:
    """Wait until each replica says that of the call, and then read the pages."""
    wanted = [{(state, owner, client)} for client in clients]
    wait_until(f"all say {wanted}", lambda: [each.told(call) for each in replicas] == wanted)
    for replica, client in zip(replicas, clients, strict=True):
        attached = "detached" if client == "away" else "attached"
        row = replica.row(call)
        assert f'title="{state}, {attached}, at replica {owner}"' in row
        assert ("elsewhere" in row) is (client == "elsewhere")
        page = replica.fetched(f"/calls/{call.stream[:12]}")
        assert f"<dd>{owner}</dd>" in page
        assert ("<dd>elsewhere</dd>" in page) is (client == "elsewhere")


def test_each_replica_tells_how_the_calls_of_the_others_are(
    replicas: list[Replica], peers: list[Peer]
) -> None:
    one, other, third = replicas
    asking = start(peers[0], "order")
    attached = start(peers[0], "build", n=2)
    moved = start(peers[0], "build", n=1)
    with one.server.connect("ws-streams") as leaving:
        leaving.initialize(POSITIONS)
        left = start(leaving, "build", n=1)
    peers[1].request("stream/resume", moved.with_token)
    calls = {each.stream[:12] for each in (asking, attached, moved, left)}
    wait_until("all are stored", lambda: set(third.calls()) == calls)
    assert (one.owned, other.owned, third.owned) == (calls, set(), set())
    [owner] = {each["owner"] for each in third.calls().values()}
    assert owner

    agree(replicas, asking, "here", "elsewhere", "elsewhere", state="asking", owner=owner)
    agree(replicas, attached, "here", "elsewhere", "elsewhere", state="running", owner=owner)
    agree(replicas, moved, "elsewhere", "here", "elsewhere", state="running", owner=owner)
    agree(replicas, left, "away", "away", "away", state="running", owner=owner)
    for replica in replicas:
        assert set(replica.calls(state="asking")) == {asking.stream[:12]}
        [question] = replica.calls()[asking.stream[:12]]["questions"]
        assert question["method"] == "elicitation/create"


def test_each_replica_tells_how_calls_have_ended(
    replicas: list[Replica], peers: list[Peer]
) -> None:
    failed = start(peers[0], "order")
    cancelled = start(peers[1], "build", n=1)
    assert called(peers[2], "finish", n=3).result
    asked = peers[0].expect(lambda message: message.method == "elicitation/create")
    refusal = {"code": -1, "message": "no"}
    peers[0].send({"jsonrpc": "2.0", "id": asked["id"], "error": refusal})
    peers[0].response(failed.id)
    peers[1].notify("notifications/cancelled", {"requestId": cancelled.id})

    def tell_so() -> bool:
        for replica in replicas:
            found = {call: each["state"] for call, each in replica.calls().items()}
            known = [found.pop(each.stream[:12], "") for each in (failed, cancelled)]
            if (known, list(found.values())) != (["failed", "cancelled"], ["completed"]):
                return False
        return True

    wait_until("all tell how they have ended", tell_so)


def test_the_survivors_tell_what_became_of_the_calls_of_one_that_was_killed(
    replicas: list[Replica], peers: list[Peer]
) -> None:
    again, lost = start(peers[0], "resumed"), start(peers[0], "build", n=1)
    wait_until("all is stored", lambda: len(replicas[2].calls()) == 2)
    survivors = replicas[1:]
    names = {owner for each in replicas for _, owner, _ in each.told(again)}
    replicas[0].server.kill()

    def heirs() -> set[str]:
        """The replicas that run it, where both survivors say the same of it."""
        [told, *others] = {each for replica in survivors for each in replica.told(again)}
        is_settled = not others and (told[0], told[2]) == ("running", "away")
        return {told[1]} - names if is_settled else set()

    def have_ended() -> bool:
        return all(each.calls()[lost.stream[:12]]["state"] == "failed" for each in survivors)

    wait_until("both name the heir", heirs)
    wait_until("both know that the other has ended", have_ended)
