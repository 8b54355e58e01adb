"""Two principals on one child: no message of one reaches the other, in whichever order they come.

The child is a stand-in in this process that asks as real servers do: it does not say for whom. Its
steps, those of the clients and trio's schedule follow from a seed.
"""

import gc
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import msgspec
import pytest
import structlog
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams.backends import supervision
from streams.backends.child import ChildBackend, ChildSettings
from streams.backends.conversation import QUESTIONS_MAX, Exchange
from streams.backends.process import Ending
from streams.client.call import RunningCall
from streams.client.client import Client
from streams.errors import StreamGone
from streams.journal.memory import MemoryJournal
from streams.keys import Keyring
from streams.messages import Message, encode
from streams.server.running import RunningServer, open_backend
from tests.rigs.server import Talker, greeted
from transports.memory import Cable, MemoryServer

Json = dict[str, Any]

NAMES: Final = ("alice", "bob")
INTERLEAVINGS: Final = int(os.environ.get("INTERLEAVINGS", "10000"))
ELICIT: Final = "elicitation/create"
KINDS: Final = ("answered", "refused", "heard", "ended", "cancelled")
LOG: Final = "notifications/message"
PROGRESS: Final = "notifications/progress"


class Calling:
    """A call that has come to the child."""

    def __init__(self, number: Any, owner: str, nth: int) -> None:
        self.number = number
        self.owner = owner
        self.nth = nth
        self.is_cancelled = False


class Child:
    """In place of a process. Each of its calls asks its own client, and says so in its question."""

    def __init__(self) -> None:
        self.pid = 1
        self.ending: Ending | None = None
        self.has_ended = trio.Event()
        self.has_room = True
        self.calls: dict[Any, Calling] = {}
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.asked: dict[str, str] = {}  # the owners of questions without an answer
        self._numbers = 0
        self._say, self._said = trio.open_memory_channel[bytes](100_000)

    async def run(self) -> None:
        await self.has_ended.wait()

    async def read(self) -> bytes:
        return await self._said.receive()

    def read_rest(self) -> bytes:
        return b""

    async def wait_for_room(self) -> None:
        pass

    def close_input(self) -> None:
        self.kill("")

    def kill(self, why: str) -> None:
        self.ending = Ending(0, None, "")
        self.has_ended.set()

    async def stop(self, _: float) -> None:
        self.kill("")

    def write(self, line: bytes) -> None:
        """Take a message of a client."""
        message = msgspec.json.decode(line)
        match message.get("method"):
            case "initialize":
                hello = {"capabilities": {}, "serverInfo": {"name": "child", "version": "1"}}
                self._answer(message["id"], {**hello, "protocolVersion": "2025-11-25"})
            case "tools/call":
                given = message["params"]["arguments"]
                self.calls[message["id"]] = Calling(message["id"], given["owner"], given["nth"])
            case "notifications/cancelled":
                if (call := self.calls.get(message["params"]["requestId"])) is not None:
                    call.is_cancelled = True
                    self.seen["cancelled"] += 1
            case None:
                self._take_answer(message)
            case _:
                if "id" in message:
                    self._answer(message["id"], {})

    def _take_answer(self, message: Json) -> None:
        owner = self.asked.pop(message["id"])
        if "error" in message:
            self.seen["refused"] += 1
        elif message["result"]["content"]["by"] == owner:
            self.seen["answered"] += 1
        else:
            self.wrong.append(f"a question for {owner} was answered: {message}")

    def ask(self, call: Calling, *before: Json) -> None:
        """Ask the client of a call something; nothing but the text says which client that is.

        The messages `before` it are written at once with it.
        """
        self._numbers += 1
        number = f"q{self._numbers}"
        self.asked[number] = call.owner
        params = {"message": call.owner, "requestedSchema": {"type": "object", "properties": {}}}
        self._send(*before, {"id": number, "method": ELICIT, "params": params})

    def log(self, call: Calling) -> None:
        """Log something that only the client of a call may read."""
        params = {"level": "info", "data": call.owner}
        self._send({"method": LOG, "params": params})

    def end(self, call: Calling) -> None:
        """Answer a call; one that was cancelled needs no answer, and may get one."""
        del self.calls[call.number]
        text = {"type": "text", "text": f"{call.owner} {call.nth}"}
        self._answer(call.number, {"content": [text]})

    def _answer(self, number: Any, result: Json) -> None:
        self._send({"id": number, "result": result})

    def _send(self, *messages: Json) -> None:
        lines = [encode({"jsonrpc": "2.0", **message}) + b"\n" for message in messages]
        self._say.send_nowait(b"".join(lines))


@asynccontextmanager
async def shared(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Child, RunningServer]]:
    child = Child()

    async def start(_: ChildSettings) -> Child:
        return child

    monkeypatch.setattr(supervision, "start", start)
    backend = ChildBackend(ChildSettings(command=("child",), isolate="none"))
    async with open_backend(backend, MemoryJournal(), Keyring.load(None)) as server:
        yield child, server


class User:
    """A principal with a client, who notes all that reaches it."""

    def __init__(self, name: str, child: Child) -> None:
        self.name = name
        self._child = child
        self.running: dict[int, tuple[RunningCall, trio.CancelScope]] = {}
        self._calls = 0

    async def answer(self, params: Json) -> Json:
        """The answer to a question, which must be its own."""
        if params["message"] != self.name:
            self._child.wrong.append(f"{self.name} was asked what was for {params['message']}")
        return {"action": "accept", "content": {"by": self.name}}

    async def call(self, client: Client) -> None:
        """Make a call to its end, until it is cancelled, or until this user leaves it."""
        self._calls += 1
        number = self._calls
        with trio.CancelScope() as scope, suppress(StreamGone):  # it was cancelled
            arguments = {"owner": self.name, "nth": number}
            async with client.call("ask", arguments) as call:
                self.running[number] = call, scope
                async for message in call:
                    self._hear(message)
                result = await call.result()
            assert result["content"][0]["text"] == f"{self.name} {number}"
            self._child.seen["ended"] += 1
        self.running.pop(number, None)

    def _hear(self, message: Message) -> None:
        if message.method == LOG:
            self._child.seen["heard"] += 1
            if msgspec.json.decode(message.params)["data"] != self.name:
                self._child.wrong.append(f"{self.name} heard {message}")


def step(chance: random.Random, child: Child, user: User) -> str:
    """The next step, one that is possible."""
    can = ["call"] * (len(user.running) < 2) + ["cancel", "leave"] * (chance.random() < 0.2)
    can += ["ask", "ask", "log", "end"] * bool(child.calls)
    return chance.choice(can or ["call"])


async def cancel(call: RunningCall) -> None:
    with suppress(RuntimeError):  # its user has left it meanwhile
        await call.cancel()


@pytest.mark.timeout(300, func_only=True)
@pytest.mark.parametrize("seed", range(4))
async def test_no_message_of_one_principal_reaches_the_other(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    trio._core._run._r.seed(seed)
    async with shared(monkeypatch) as (child, server), trio.open_nursery() as nursery:
        users = [User(name, child) for name in NAMES]
        clients = []
        for user in users:
            front = MemoryServer(principal=user.name)
            await nursery.start(front.serve, server.serve)
            clients.append(
                await _entered(nursery, Client(front.connect, answers={ELICIT: user.answer}))
            )
        for _ in range(INTERLEAVINGS // 4):
            at = chance.randrange(2)
            calls = list(child.calls.values())
            match step(chance, child, users[at]):
                case "call":
                    nursery.start_soon(users[at].call, clients[at])
                case "cancel" | "leave" as how if users[at].running:
                    call, scope = chance.choice(list(users[at].running.values()))
                    nursery.start_soon(cancel, call) if how == "cancel" else scope.cancel()
                case "ask":
                    child.ask(chance.choice(calls))
                case "log":
                    child.log(chance.choice(calls))
                case "end":
                    child.end(chance.choice(calls))
            for _ in range(chance.randrange(12)):
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    print(dict(child.seen))
    assert not child.wrong, child.wrong[:3]
    assert min(child.seen[each] for each in KINDS) > 20


async def test_questions_of_cancelled_calls_take_no_places(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Many a call is cancelled while it passes on what the child wrote ahead of the question."""
    with structlog.testing.capture_logs() as logs:
        async with shared(monkeypatch) as (child, server), trio.open_nursery() as nursery:
            cable = Cable(principal="alice")
            nursery.start_soon(server.serve, cable.far)
            talker = await greeted(Talker(cable.near, cable), {"elicitation": {}})
            for number in range(4 * QUESTIONS_MAX):
                await talker.call(number, "ask", token=number, owner="alice", nth=number)
                await wait_all_tasks_blocked()
                (call,) = child.calls.values()
                progress = {"progressToken": call.number, "progress": 1}
                child.ask(call, {"method": PROGRESS, "params": progress})
                await talker.tell("notifications/cancelled", requestId=number)
                await wait_all_tasks_blocked()
                child.end(call)
                await wait_all_tasks_blocked()
            await talker.call("last", "ask", owner="alice", nth=0)
            await wait_all_tasks_blocked()
            child.ask(*child.calls.values())
            await talker.find(lambda message: message.get("method") == ELICIT)
            nursery.cancel_scope.cancel()
    assert not [each for each in logs if each["log_level"] == "error"]


async def test_of_a_cancelled_call_no_request_is_kept(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """As a server should, the child does not answer it; so all is late that it says of it."""
    async with shared(monkeypatch) as (child, server), trio.open_nursery() as nursery:
        cable = Cable(principal="mallory")
        nursery.start_soon(server.serve, cable.far)
        talker = await greeted(Talker(cable.near, cable), {"elicitation": {}})
        for number in range(3):
            await talker.call(number, "ask", owner="mallory", nth=number)
            await wait_all_tasks_blocked()
            child.ask(child.calls[max(child.calls)])
            await talker.tell("notifications/cancelled", requestId=number)
            await wait_all_tasks_blocked()
        await trio.sleep(60)
        gc.collect()
        found = [each for each in gc.get_objects() if isinstance(each, Exchange)]
        assert not [each for each in found if each.session.principal == "mallory"]
        for call in list(child.calls.values()):
            child.ask(call)
            child.log(call)
            child.end(call)
        assert await talker.request(10, "tools/list") == {}
        assert not [each for each in talker.seen if each.get("method") == LOG]
        await talker.call(11, "ask", owner="mallory", nth=0)
        await wait_all_tasks_blocked()
        child.ask(*child.calls.values())
        await talker.find(lambda message: message.get("method") == ELICIT)
        nursery.cancel_scope.cancel()


async def _entered(nursery: trio.Nursery, client: Client) -> Client:
    async def run(*, task_status: trio.TaskStatus[Client]) -> None:
        async with client:
            task_status.started(client)
            await trio.sleep_forever()

    entered: Client = await nursery.start(run)
    return entered
