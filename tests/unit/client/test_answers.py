"""The client's answers to requests of the server."""

import gc
import weakref
from functools import partial

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import messages
from streams.client.answers import TASKS_MAX, Answers
from streams.client.call import RunningCall
from streams.messages import look
from tests.rigs.clients import Asking, Params, connected
from tests.rigs.scripted import Scripted


async def test_a_request_of_the_server_is_answered_by_the_handler() -> None:
    server = Scripted()
    asking = Asking(server)
    asking.may_answer.set()
    answers = {"elicitation/create": asking.handler}
    async with connected(server, answers=answers) as client, client.call("ask") as call:
        methods = [message.method async for message in call]
        assert methods == ["notifications/message", "elicitation/create"]
        result = await call.result()
    assert result["answer"]["result"] == {"action": "accept", "to": "Go on?"}


async def test_a_handler_may_be_a_plain_function() -> None:
    server = Scripted()
    server.tools["ask"] = Asking(server)

    def agree(params: Params) -> Params:
        return {"action": "accept", "to": params["message"]}

    answers = {"elicitation/create": agree}
    async with connected(server, answers=answers) as client, client.call("ask") as call:
        result = await call.result()
    assert result["answer"]["result"] == {"action": "accept", "to": "Go on?"}


async def test_an_answer_that_is_kept_keeps_no_call() -> None:
    server = Scripted()
    asking = Asking(server)
    asking.may_answer.set()
    calls: list[weakref.ref[RunningCall]] = []
    async with connected(server, answers={"elicitation/create": asking.handler}) as client:
        for _ in range(3):
            async with client.call("ask") as call:
                await call.result()
            calls.append(weakref.ref(call))
        del call
        await client.ping()
        gc.collect()
        assert [each() for each in calls[:-1]] == [None] * 2  # the connection knows the last one


async def test_a_handler_is_asked_once_however_often_the_server_asks(
    autojump_clock: MockClock,
) -> None:
    server = Scripted()
    asking = Asking(server)
    answers = {"elicitation/create": asking.handler}
    async with connected(server, answers=answers) as client, client.call("ask") as call:
        for _ in range(2):
            await anext(call)
        with trio.move_on_after(3):
            await anext(call)  # so that both count as read
        for n in range(1, 4):
            server.cut()
            await server.until(partial(_was_resumed, server, n))
        await wait_all_tasks_blocked()
        asking.may_answer.set()
        result = await call.result()
    assert result["answer"]["result"]["action"] == "accept"
    assert asking.asked == 1


async def test_a_server_that_asks_and_reads_no_answers_takes_no_room_without_bound() -> None:
    class Stuck:
        is_over = False

        async def send(self, line: bytes) -> None:
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        answers = Answers({})
        answers.nursery = nursery
        for number in range(2 * TASKS_MAX):
            answers.take(look(messages.request(number, "ping", {})), number, Stuck())
            answers.take(look(messages.request(number, "ping", {})), number, Stuck())  # again
        await wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == TASKS_MAX
        nursery.cancel_scope.cancel()
    async with trio.open_nursery() as nursery:  # those that were cancelled make room
        answers.nursery = nursery
        answers.take(look(messages.request("x", "ping", {})), "x", Stuck())
        assert len(nursery.child_tasks) == 1
        nursery.cancel_scope.cancel()


async def test_an_answer_that_was_lost_with_the_connection_is_sent_again(
    autojump_clock: MockClock,
) -> None:
    server = Scripted()
    asking = Asking(server)
    answers = {"elicitation/create": asking.handler}
    async with connected(server, answers=answers) as client, client.call("ask") as call:
        for _ in range(2):
            await anext(call)
        await trio.sleep(5)
        server.memory.cables[-1].cut_after(to_far=1)  # the answer's first byte is the last
        asking.may_answer.set()
        result = await call.result()
    assert result["answer"]["result"]["action"] == "accept"
    assert asking.asked == 1


async def test_an_answer_given_while_there_was_no_connection_is_sent_when_there_is(
    autojump_clock: MockClock,
) -> None:
    server = Scripted(min_s=5)
    asking = Asking(server)
    answers = {"elicitation/create": asking.handler}
    async with connected(server, answers=answers) as client, client.call("ask") as call:
        for _ in range(2):
            await anext(call)
        server.cut()
        asking.may_answer.set()
        assert (await call.result())["answer"]["result"]["action"] == "accept"
    assert asking.asked == 1


async def test_what_no_handler_answers_is_refused_politely() -> None:
    server = Scripted()
    Asking(server)
    async with connected(server) as client, client.call("ask") as call:
        answer = (await call.result())["answer"]
    assert answer["error"]["code"] == -32601


async def test_a_handler_that_fails_tells_the_server_why() -> None:
    async def handler(params: Params) -> Params:
        raise LookupError("nobody there")

    server = Scripted()
    Asking(server)
    answers = {"elicitation/create": handler}
    async with connected(server, answers=answers) as client, client.call("ask") as call:
        answer = (await call.result())["answer"]
    assert answer["error"] == {"code": -32603, "message": "LookupError: nobody there"}


async def test_a_ping_of_the_server_is_answered() -> None:
    server = Scripted()
    async with connected(server) as client:
        await client.ping()
        server.connections[0].reply(b'{"jsonrpc":"2.0","id":7,"method":"ping"}\n')
        await server.until(lambda: any(m.get("result") == {} for _, m in server.received))
        assert server.received[-1][1] == {"jsonrpc": "2.0", "id": 7, "result": {}}


def _was_resumed(server: Scripted, times: int) -> bool:
    return len(server.got("stream/resume")) == times
