"""`streams.aio.Client`: the same client, in a shell. The server runs in the same guest."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
import trio

import streams
from streams.aio import Client
from streams.aio.guest import Guest, Held
from streams.client import client as for_trio
from streams.errors import CannotConnect
from tests.rigs.clients import Params, Stepping, at_home, counting, said
from tests.rigs.scripted import Scripted, Stream

WITHIN_S = 30


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, WITHIN_S))


@contextlib.asynccontextmanager
async def connected(server: Scripted, **options: Any) -> AsyncIterator[Client]:
    guest = await Guest.enter()
    serving = Held(guest, server.serving())
    await serving.enter()
    try:
        async with Client(server.memory.connect, **options) as client:
            yield client
    finally:
        await serving.leave(None)
        await guest.leave()


def test_messages_come_in_order_through_cuts() -> None:
    async def main() -> None:
        server = Scripted()
        step = Stepping(server)
        async with connected(server) as client, client.call("step") as call:
            for n in range(20):
                step.say(f"{n}a", f"{n}b")
                assert said(await anext(call)) == f"{n}a"
                server.cut()
                step.say(f"{n}c")
                assert said(await anext(call)) == f"{n}b"
                assert said(await anext(call)) == f"{n}c"
            step.say(None)
            assert (await call.result())["done"]
            with pytest.raises(StopAsyncIteration):
                await anext(call)
        assert len(server.connections) == 21

    run(main())


def test_a_reader_that_is_cancelled_again_and_again_loses_nothing() -> None:
    """The message and the cancellation come in the same turn of the loop, in each order."""

    async def main() -> None:
        server = Scripted()
        step = Stepping(server)
        seen: list[str] = []
        async with connected(server) as client, client.call("step") as call:
            for number in range(200):
                reading = asyncio.create_task(read_one(call, seen))
                step.say(str(number))
                for _ in range(number % 40):
                    await asyncio.sleep(0)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                assert call.ticket is None or (call.ticket.after or 0) == len(seen)
            step.say(None)
            seen += [said(message) async for message in call]
        assert seen == [str(number) for number in range(200)]

    async def read_one(call: streams.client.call.RunningCall, seen: list[str]) -> None:
        seen.append(said(await anext(call)))

    run(main())


def test_a_cancelled_block_leaves_its_call_and_another_resumes_it() -> None:
    async def main() -> None:
        server = Scripted()
        step = Stepping(server)

        async def read(call: streams.client.call.RunningCall) -> None:
            async with asyncio.timeout(0.05), call:
                step.say("1")
                assert said(await anext(call)) == "1"
                await anext(call)

        async with connected(server) as client:
            call = client.call("step")
            with pytest.raises(TimeoutError):
                await read(call)
            assert call.ticket is not None
            assert call.ticket.after == 1
            step.say("2", None)
            async with client.resume(call.ticket) as again:
                assert [said(message) async for message in again] == ["2"]
            assert (await client.join(call.ticket)).is_done

    run(main())


def test_an_error_in_a_block_does_not_confirm_the_message_in_hand() -> None:
    async def main() -> None:
        async with connected(counting()) as client:
            call = client.call("count", {"n": 3})
            with pytest.raises(ZeroDivisionError):
                await fail_at_the_second(call)
            assert call.confirmed == 1

    async def fail_at_the_second(call: streams.client.call.RunningCall) -> None:
        async with call:
            await anext(call)
            await anext(call)
            raise ZeroDivisionError

    run(main())


def test_runs_are_read_as_under_trio() -> None:
    async def main() -> None:
        server = counting()
        async with connected(server) as client, client.call("count", {"n": 1_000}) as call:
            assert sum([run.count async for run in call.runs()]) == 1_000
            assert (await call.result())["counted"] == 1_000

    run(main())


def plain(params: Params) -> Params:
    assert asyncio.get_running_loop()
    return {"to": params["message"]}


async def of_asyncio(params: Params) -> Params:
    assert asyncio.current_task()
    await asyncio.sleep(0.01)
    return {"to": params["message"]}


class Answering:
    async def __call__(self, params: Params) -> Params:
        return await of_asyncio(params)


async def ask(stream: Stream) -> Any:
    answer = await stream.ask("elicitation/create", {"message": "Go on?"})
    return {"content": [], "answer": answer.get("result", answer.get("error"))}


@pytest.mark.parametrize(
    "handler", [plain, of_asyncio, Answering()], ids=["plain", "coroutine", "object"]
)
@pytest.mark.parametrize("is_late", [False, True], ids=["in the settings", "registered"])
def test_handlers_are_plain_functions_and_coroutine_functions(
    handler: Callable[[Params], Any], is_late: bool
) -> None:
    async def main() -> None:
        server = Scripted()
        server.tools["ask"] = ask
        async with contextlib.AsyncExitStack() as stack:
            answers = {} if is_late else {"elicitation/create": handler}
            client = await stack.enter_async_context(connected(server, answers=answers))
            if is_late:
                client.on_request("elicitation/create", handler)
            call = await stack.enter_async_context(client.call("ask"))
            assert (await call.result())["answer"] == {"to": "Go on?"}

    run(main())


def test_handlers_are_given_by_name_and_a_plain_one_may_return_a_coroutine() -> None:
    heard: list[Any] = []

    async def hear(what: Any) -> None:
        await asyncio.sleep(0)
        heard.append(what)

    async def main() -> None:
        server = Scripted()
        server.tools["work"] = work
        async with connected(server, on_notification=lambda message: hear("any")) as client:
            client.on_notification(method="notifications/other", handler=hear)
            server.notify("notifications/other", {"data": 1})
            await client.call_tool("work", on_progress=lambda done, total, text: hear(done))
            while len(heard) < 3:
                await asyncio.sleep(0.001)
        assert sorted(map(str, heard)) == ["1.0", "any", "{'data': 1}"]

    async def work(stream: Stream) -> Any:
        params = {"progressToken": stream.progress_token, "progress": 1}
        stream.notify("notifications/progress", params)
        return {"content": []}

    run(main())


def test_the_task_of_a_handler_is_made_by_asyncio_alone() -> None:
    """An eager task runs where it is made, and a handler may use the client."""
    were_in_trio: list[bool] = []

    def make(loop: Any, coroutine: Any, **settings: Any) -> Any:
        were_in_trio.append(trio.lowlevel.in_trio_task())
        return asyncio.Task(coroutine, loop=loop, **settings)

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(make)
        server = Scripted()
        server.tools["ask"] = ask
        answers = {"elicitation/create": of_asyncio}
        async with connected(server, answers=answers) as client, client.call("ask") as call:
            assert (await call.result())["answer"] == {"to": "Go on?"}

    run(main())
    assert were_in_trio
    assert not any(were_in_trio)


def test_the_error_of_a_handler_is_the_servers() -> None:
    async def fail(params: Params) -> None:
        raise ValueError("not now")

    async def main() -> None:
        server = Scripted()
        server.tools["ask"] = ask
        answers = {"elicitation/create": fail}
        async with connected(server, answers=answers) as client, client.call("ask") as call:
            assert "ValueError: not now" in (await call.result())["answer"]["message"]

    run(main())


def test_a_handler_ends_with_its_client() -> None:
    seen = []

    async def wait(params: Params) -> None:
        seen.append("begun")
        try:
            await asyncio.sleep(WITHIN_S)
        finally:
            await asyncio.sleep(0)
            seen.append("ended")

    async def main() -> None:
        server = Scripted()
        server.tools["ask"] = ask
        answers = {"elicitation/create": wait}
        async with connected(server, answers=answers) as client, client.call("ask") as call:
            await anext(call)
            while not seen:
                await asyncio.sleep(0.001)
        assert seen == ["begun", "ended"]

    run(main())


def test_no_connection_is_an_error_as_it_is() -> None:
    @contextlib.asynccontextmanager
    async def refused() -> AsyncIterator[Any]:
        raise ConnectionRefusedError("the port is closed")
        yield

    async def main() -> None:
        with pytest.raises(CannotConnect, match="the port is closed"):
            async with Client(refused):
                pytest.fail("there is no connection")

    run(main())


def test_a_failure_of_the_client_cancels_the_block_and_is_raised() -> None:
    """As the nursery of a client does it under trio."""

    async def fail() -> None:
        raise LookupError("in a task of the client")

    async def main() -> None:
        with pytest.raises(LookupError, match="in a task of the client"):
            await use()

    async def use() -> None:
        async with connected(Scripted()) as client:
            client._nursery.start_soon(fail)
            await asyncio.sleep(WITHIN_S)

    run(main())


def test_two_clients_in_one_loop_and_one_after_the_other() -> None:
    async def main() -> None:
        for _ in range(2):
            server = counting()
            async with connected(server) as one, Client(server.memory.connect) as other:
                await asyncio.gather(*(use(each) for each in (one, other, one, other)))

    async def use(client: Client) -> None:
        async with client.call("count", {"n": 10}) as call:
            assert len([message async for message in call]) == 10
        await client.ping()

    run(main())


def test_each_step_may_have_a_task_of_its_own() -> None:
    """As the cells of a notebook have."""

    async def main() -> None:
        server = counting()
        guest = await Guest.enter()
        serving = Held(guest, server.serving())
        await serving.enter()
        client = await asyncio.create_task(Client(server.memory.connect).__aenter__())
        call = await asyncio.create_task(client.call("count", {"n": 2}).__aenter__())
        texts = [said(await asyncio.create_task(call.__anext__())) for _ in range(2)]
        assert texts == ["1", "2"]
        assert (await asyncio.create_task(call.result()))["counted"] == 2
        await asyncio.create_task(call.__aexit__(None, None, None))
        await asyncio.create_task(client.__aexit__(None, None, None))
        await serving.leave(None)
        await guest.leave()

    run(main())


def test_a_client_that_is_not_entered_says_so() -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="use `async with`"):
            await Client(Scripted().memory.connect).ping()

    run(main())


def test_a_loop_that_ends_around_an_open_client_ends_it() -> None:
    async def main() -> None:
        server = Scripted()
        guest = await Guest.enter()
        await Held(guest, server.serving()).enter()
        await Client(server.memory.connect).__aenter__()

    asyncio.run(main())
    gc.collect()


def test_a_loop_that_ends_cancels_a_task_with_a_client_as_any_other() -> None:
    """`asyncio.run` tells its exception handler of tasks that end in another way."""
    tasks: list[asyncio.Task[None]] = []
    is_open = asyncio.Event()

    async def work() -> None:
        async with Client(streams.Server("s")) as client:
            await client.ping()
            is_open.set()
            await asyncio.sleep(WITHIN_S)

    async def main() -> None:
        tasks.append(asyncio.create_task(work()))
        await is_open.wait()

    asyncio.run(main())
    assert tasks[0].cancelled()


async def test_under_trio_it_is_the_client_for_trio() -> None:
    server = counting()
    async with server.serving(), Client(server.memory.connect) as client:
        async with client.call("count", {"n": 5}) as call:
            assert len([message async for message in call]) == 5
        await client.ping()


def paging() -> Any:
    server = streams.Server("paging", resume_min_s=0, resume_max_s=600)

    @server.tool(pages=True)
    async def rows(call: streams.Call, n: int) -> AsyncIterator[str]:
        for number in range(1, n + 1):
            yield f"page {number}"

    return at_home(server)


@pytest.mark.parametrize("is_by_token", [False, True])
def test_a_page_whose_reader_is_cancelled_comes_next(is_by_token: bool) -> None:
    async def main() -> None:
        guest = await Guest.enter()
        home = Held(guest, paging())
        memory = await home.enter()
        seen: list[str] = []
        async with Client(memory.connect) as client:
            pages = client.pages("rows", {"n": 60})
            for turns in range(60):
                reading = asyncio.create_task(read_one(pages, seen))
                for _ in range(turns):
                    await asyncio.sleep(0)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            if is_by_token and pages.token is not None:
                pages = client.pages("rows", {"n": 60}, token=pages.token)
            seen += [page["content"][0]["text"] async for page in pages]
        assert seen == [f"page {number}" for number in range(1, 61)]
        await home.leave(None)
        await guest.leave()

    async def read_one(pages: Any, seen: list[str]) -> None:
        seen.append((await anext(pages))["content"][0]["text"])

    run(main())


def coroutines(cls: type) -> Iterator[str]:
    for name in dir(cls):
        if asyncio.iscoroutinefunction(getattr(cls, name)):
            yield name


def test_each_method_that_may_wait_has_a_shell() -> None:
    for cls in (Client, streams.aio.RunningCall, streams.aio.Pages):
        base = cls.__mro__[1]
        for name in coroutines(base):
            assert getattr(cls, name) is not getattr(base, name), name
            if not name.startswith("__"):
                assert getattr(cls, name).__doc__ == getattr(base, name).__doc__
    assert set(coroutines(for_trio.Client)) <= set(coroutines(Client))
