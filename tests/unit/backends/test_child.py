"""A child process as a backend: what passes between it and a client, and where it goes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from streams.backends.child import ChildBackend
from streams.journal.memory import MemoryJournal
from streams.keys import Keyring
from streams.server.patience import PatienceSettings
from streams.server.running import open_backend
from tests.rigs.children import (
    PATIENCE_S,
    Patient,
    call,
    said,
    settings,
    state,
    surfing,
    text,
    until,
    wrapped,
)
from tests.rigs.server import PLAIN, House, Json, Talker

ASKING: Json = {"elicitation": {}, "sampling": {}, "roots": {}}


def logs(talker: Talker) -> list[Any]:
    """The data of the log messages that have come."""
    is_log = "notifications/message"
    return [each["params"]["data"] for each in talker.seen if each.get("method") == is_log]


def methods(talker: Talker) -> list[str]:
    return [each["method"] for each in talker.seen if "method" in each]


def asks(method: str) -> Callable[[Json], bool]:
    return lambda message: message.get("method") == method


async def greeting(talker: Talker, **params: Any) -> Json:
    """The answer to `initialize`."""
    given = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": CLIENT} | params
    return await talker.request("hello", "initialize", **given)


CLIENT: Json = {"name": "tester", "version": "9", "title": "The tester"}


# Verbatim


async def test_a_call_passes_as_it_is() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        given = {"a": [1, None, "\ud7ff"], "b": {"c": 12345678901234567890}}
        assert said(await call(talker, "echo", **given)) == given


async def test_bytes_pass_but_for_ids(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with wrapped(does={"log": log}) as (house, _):
        talker = await house.dial(PLAIN)
        params = b'{ "z":1.0,"x":"\\u0041", "big":12345678901234567890123.50 }'
        await talker.channel.send(
            b'{"extra":[1.50],"params":'
            + params
            + b',"id":"mine","method":"acme/x","jsonrpc":"2.0"}\n'
        )
        answer = await talker.answer("mine")
        assert answer["result"]["given"]["x"] == "A"
        assert list(answer) == ["jsonrpc", "id", "result", "extra"]
        sent = log.read_bytes().splitlines()[-1]
        assert sent.startswith(b'{"extra":[1.50],"params":' + params + b',"id":')
        assert isinstance(json.loads(sent)["id"], int)


async def test_a_request_over_several_lines_becomes_one() -> None:
    async with wrapped() as (house, _), surfing(house, PLAIN) as web:
        body = b'{"jsonrpc":"2.0","id":7,"method":"acme/x",\r\n"params":{\n"a":\t1\n}}'
        answer = web.ask("POST", body)
        assert isinstance(answer, Patient)
        assert (await answer.whole())["result"]["given"] == {"a": 1}


async def test_the_hello_of_the_child_is_told_with_our_extension() -> None:
    async with wrapped() as (house, _):
        cable = house.cable()
        hello = await greeting(Talker(cable.near, cable))
        assert hello["serverInfo"] == {"name": "naughty", "version": "1", "extra": True}
        assert hello["instructions"] == "Beware."
        assert hello["capabilities"]["experimental"].keys() == {"theirs", "mcp-streams/v1"}
        assert hello["capabilities"]["extensions"].keys() == {"mcp-streams/v1"}


async def test_the_child_hears_the_clients_own_hello_without_our_capabilities() -> None:
    async with wrapped() as (house, _):
        cable = house.cable()
        talker = Talker(cable.near, cable)
        ours = {"streams": {}, "experimental": {"mcp-streams/v1": {}, "acme": {"a": 1}}}
        capabilities = {"roots": {"listChanged": True}, **ours}
        more = {"_meta": {"acme/trace": "1"}, "acme": [1]}
        await greeting(talker, capabilities=capabilities, protocolVersion="2025-06-18", **more)
        heard = (await state(talker))["client"]
        assert heard == {
            "protocolVersion": "2025-06-18",
            "capabilities": {"roots": {"listChanged": True}, "experimental": {"acme": {"a": 1}}},
            "clientInfo": CLIENT,
            **more,
        }


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ("2024-11-05", "2024-11-05"),
        ("2024-10-07", "2024-11-05"),
        ("2025-03-26", "2025-03-26"),
        ("2026-07-28", "2025-11-25"),
    ],
)
async def test_the_revision_of_the_child_is_told(theirs: str, told: str) -> None:
    async with wrapped(does={"revision": theirs}) as (house, _):
        cable = house.cable()
        talker = Talker(cable.near, cable)
        assert (await greeting(talker))["protocolVersion"] == told
        assert text(await call(talker, "echo")) == "{}"


async def test_errors_of_the_child_pass() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        error = {"code": -32601, "message": "Method not found", "data": [1]}
        assert await talker.request(1, "prompts/get", name="x") == error
        assert await call(talker, "no such tool", 2) == {
            "code": -32602,
            "message": "Unknown: no such tool",
        }


async def test_unknown_notifications_pass_to_both_sides() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        await talker.tell("notifications/acme", a=1)
        found = await until(talker, lambda state: state.get("told"))
        assert found["told"] == [
            {"jsonrpc": "2.0", "method": "notifications/acme", "params": {"a": 1}}
        ]
        await call(talker, "stray", tell=["notifications/theirs"], params={"b": [2]})
        told = await talker.find(asks("notifications/theirs"))
        assert told["params"] == {"b": [2]}


async def test_the_client_tells_once_that_it_is_initialized() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        await talker.tell("notifications/initialized")
        assert (await state(talker))["initialized"] == 1


# Progress


@pytest.mark.parametrize("token", ["mine", 17, "1"])
async def test_progress_has_the_clients_token(token: Any) -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        await talker.call(1, "count", token=token, n=3)
        await talker.answer(1)
        told = [each["params"] for each in talker.seen if each.get("method", "").endswith("gress")]
        assert told == [{"progressToken": token, "progress": number} for number in (1, 2, 3)]
        assert logs(talker) == [1, 2, 3]


async def test_progress_for_a_client_that_wants_none_is_dropped() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        await talker.call(1, "count", n=3)
        await talker.answer(1)
        assert methods(talker) == ["notifications/message"] * 3


async def test_the_child_gets_a_token_of_ours_and_no_key_of_ours() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        assert said(await call(talker, "own_token"))["type"] == "int"
        meta = {"progressToken": "theirs", "mcp-streams/idempotencyKey": "k", "acme": 1}
        await talker.ask(2, "tools/call", name="own_token", arguments={}, _meta=meta)
        assert said((await talker.answer(2))["result"])["type"] == "int"


@pytest.mark.parametrize(
    "page",
    [{"resumeToken": "next"}, {"_meta": {"mcp-streams/resumeToken": "next"}}],
    ids=["in_params", "in_meta"],
)
async def test_a_page_token_of_the_child_passes(page: Json, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with wrapped(does={"log": log}) as (house, _):
        talker = await house.dial(PLAIN)
        await talker.ask(1, "tools/call", name="echo", arguments={"a": 1}, **page)
        assert said((await talker.answer(1))["result"]) == {"a": 1}
        sent = json.loads(log.read_bytes().splitlines()[-1])["params"]
        sent["_meta"].pop("progressToken")
        assert sent == {"name": "echo", "arguments": {"a": 1}, "_meta": {}} | page


async def test_a_call_for_a_page_joins_no_other_call(tmp_path: Path) -> None:
    log = tmp_path / "log"
    backend = ChildBackend(settings(does={"log": log}))
    once = PatienceSettings(once=("echo",))
    with trio.fail_after(PATIENCE_S):
        async with (
            open_backend(backend, MemoryJournal(), Keyring.load(None), patience=once) as running,
            trio.open_nursery() as nursery,
        ):
            talker = await House(running, MemoryJournal(), nursery).dial(PLAIN)
            for number, page in enumerate(({}, {}, {"resumeToken": "a"}, {"resumeToken": "b"}), 1):
                given = {"name": "echo", "arguments": {"a": 1}} | page
                await talker.ask(number, "tools/call", **given)
                await talker.answer(number)
            nursery.cancel_scope.cancel()
    calls = [line for line in log.read_text().splitlines() if "tools/call" in line]
    assert [json.loads(line)["params"].get("resumeToken") for line in calls] == [None, "a", "b"]


async def test_progress_after_the_response_is_dropped() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        await talker.call(1, "after", token="t")
        await talker.answer(1)
        await state(talker)
        assert methods(talker) == ["notifications/progress"]


# Whose message it is


async def test_two_calls_at_once_keep_their_progress_apart() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        await talker.call(1, "never", token="a")
        await talker.call(2, "count", token="b", n=2)
        await talker.answer(2)
        tokens = [each["params"].get("progressToken") for each in talker.seen if "params" in each]
        assert "a" not in tokens
        assert tokens.count("b") == 2


async def test_a_message_of_no_call_comes_over_the_session() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        news = ["notifications/tools/list_changed", "notifications/message"]
        await call(talker, "stray", tell=news, params={"data": "x"})
        await talker.find(asks("notifications/message"))
        assert methods(talker) == news


async def test_a_message_after_an_answer_stays_behind_it() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        first, news = "notifications/first", "notifications/tasks/status"
        talker.seen.clear()
        await talker.call(1, "stray", first=first, tell=[news])
        await talker.find(asks(news))
        assert [each.get("method", "the answer") for each in talker.seen] == [
            first,
            "the answer",
            news,
        ]


async def test_a_message_after_an_answer_waits_for_no_client_that_reads_nothing() -> None:
    async with wrapped(isolate="none") as (house, _):
        deaf, other = await house.dial(PLAIN), await house.dial(PLAIN)
        await deaf.call(1, "huge", bytes=3_000_000)
        await deaf.call(
            2, "stray", first="notifications/first", tell=["notifications/tools/list_changed"]
        )
        await other.find(asks("notifications/tools/list_changed"))


async def test_strays_wait_for_a_client_that_is_away_the_latest_of_each_kind() -> None:
    async with wrapped() as (house, _), surfing(house, PLAIN) as web:
        for uri in ("a:1", "a:2", "a:1"):
            params = {"uri": uri}
            await web.call_tool("stray", tell=["notifications/resources/updated"], params=params)
        await web.call_tool("echo")
        standing = await web.standing()
        await standing.find(lambda message: message["params"]["uri"] == "a:1")
        assert [each["params"]["uri"] for each in standing.messages] == ["a:2", "a:1"]


# Questions


@pytest.mark.parametrize("method", ["sampling/createMessage", "elicitation/create", "roots/list"])
async def test_a_question_of_a_call_is_answered(method: str) -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(ASKING)
        await talker.call(1, "question", method=method, params={"message": "?", "x": [1.0]})
        question = await talker.find(asks(method))
        assert question["params"] == {"message": "?", "x": [1.0]}
        assert question["id"] != "q1"
        await talker.say({"id": question["id"], "result": {"a": {"b": 1}}})
        assert said((await talker.answer(1))["result"]) == {"a": {"b": 1}}


async def test_an_error_is_an_answer_too() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(ASKING)
        await talker.call(1, "question")
        question = await talker.find(asks("elicitation/create"))
        error = {"code": -1, "message": "User rejected", "data": {"x": 1}}
        await talker.say({"id": question["id"], "error": error})
        assert said((await talker.answer(1))["result"]) == error


async def test_the_first_answer_counts() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(ASKING)
        await talker.call(1, "question")
        question = await talker.find(asks("elicitation/create"))
        await talker.say(
            {"id": question["id"], "result": {"n": 1}}, {"id": question["id"], "result": {"n": 2}}
        )
        assert said((await talker.answer(1))["result"]) == {"n": 1}
        assert len((await state(talker))["answers"]) == 1


async def test_a_question_survives_a_cut() -> None:
    async with wrapped() as (house, _):
        first = await house.dial({"streams": {}})
        stream = await first.begin(1, "question")
        question = await first.find(asks("elicitation/create"))
        await first.channel.aclose()
        second = await house.dial({"streams": {}})
        await second.ask(2, "stream/resume", streamId=stream["streamId"])
        again = await second.find(asks("elicitation/create"))
        assert again["id"] == question["id"]
        await second.say({"id": question["id"], "result": {"n": 1}})
        assert said((await second.answer(1))["result"]) == {"n": 1}


async def test_a_question_of_no_call_goes_to_the_session() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(ASKING)
        await call(talker, "stray", ask="roots/list")
        question = await talker.find(asks("roots/list"))
        await talker.say({"id": question["id"], "result": {"roots": []}})
        found = await until(talker, lambda state: state["answers"])
        assert found["answers"] == [{"jsonrpc": "2.0", "id": "q1", "result": {"roots": []}}]


async def test_a_question_right_after_the_hello_waits_for_the_client() -> None:
    async with wrapped(does={"start": "asks"}) as (house, _), surfing(house, ASKING) as web:
        standing = await web.standing()
        question = await standing.find(asks("roots/list"))
        web.ask("POST", {"jsonrpc": "2.0", "id": question["id"], "result": {"roots": []}})
        while not said(await web.call_tool("state"))["answers"]:
            await trio.sleep(0.02)


async def test_a_child_may_withdraw_a_question() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(ASKING)
        await talker.call(1, "withdrawn")
        question = await talker.find(asks("elicitation/create"))
        told = await talker.find(asks("notifications/cancelled"))
        assert told["params"] == {"requestId": question["id"], "reason": "no longer needed"}
        await talker.answer(1)
        await talker.say({"id": question["id"], "result": {}})
        assert text(await call(talker, "echo", 2)) == "{}"


async def test_more_questions_than_a_user_can_answer_are_refused() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(ASKING)
        await talker.call(1, "questions", n=150)
        for _ in range(50):
            await talker.find(asks("notifications/message"))  # none is answered before these
        for question in filter(asks("elicitation/create"), list(talker.seen)):
            await talker.say({"id": question["id"], "result": {}})
        answers = said((await talker.answer(1))["result"])
        assert (answers.count(True), answers.count(False)) == (100, 50)


async def test_a_ping_of_the_child_is_answered_here() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        await call(talker, "stray", ask="ping")
        found = await until(talker, lambda state: state["answers"])
        assert found["answers"] == [{"jsonrpc": "2.0", "id": "q1", "result": {}}]
        assert methods(talker) == []


# Cancels, and answers that are not awaited


async def test_a_message_after_a_cancel_is_not_lost() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(ASKING)
        await talker.call(1, "late")
        await talker.find(asks("notifications/message"))
        await talker.tell("notifications/cancelled", requestId=1)
        told = await talker.find(asks("notifications/message"))
        assert told["params"]["data"] == "too late"
        await call(talker, "stray", 2, ask="roots/list")
        question = await talker.find(asks("roots/list"))
        await talker.say({"id": question["id"], "result": {"roots": []}})
        await until(talker, lambda state: state["answers"])
        assert not any(each.get("id") == 1 for each in talker.seen)


async def test_a_cancel_reaches_the_child_under_its_id(tmp_path: Path) -> None:
    file = tmp_path / "log"
    async with wrapped(does={"log": file}) as (house, _):
        talker = await house.dial(PLAIN)
        await talker.call("mine", "late")
        await talker.find(asks("notifications/message"))
        late = said(await call(talker, "state"))["late"]
        await talker.tell(
            "notifications/cancelled", requestId="mine", reason="I have changed my mind"
        )
        while b"cancelled" not in file.read_bytes():
            await trio.sleep(0.01)
        await trio.sleep(0.1)  # for the answer of the child, which comes all the same
        assert (await state(talker))["cancelled"] == {
            "requestId": late,
            "reason": "I have changed my mind",
        }
        assert not any(each.get("id") == "mine" for each in talker.seen)


async def test_a_second_answer_is_dropped() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        assert text(await call(talker, "twice")) == "first"
        assert text(await call(talker, "echo", 2)) == "{}"
        assert [each["id"] for each in talker.seen if "result" in each] == [1, 2]


# Tasks


async def test_a_question_of_a_task_goes_to_the_request_about_it() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(ASKING)
        assert (await call(talker, "task"))["task"]["taskId"] == "t1"
        await talker.call(2, "never")
        await talker.ask(3, "tasks/result", taskId="t1")
        question = await talker.find(asks("elicitation/create"))
        assert question["params"]["_meta"].keys() == {"io.modelcontextprotocol/related-task"}
        await talker.say({"id": question["id"], "result": {"action": "accept"}})
        assert text((await talker.answer(3))["result"]) == "of the task"


# Answers that are not quite JSON-RPC


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (r'"\ud83d"', "\ufffd"),
        (r'"\ud83d\ude00"', "\U0001f600"),
        ('["a\\udc00b", NaN, Infinity, 1.5]', ["a\ufffdb", None, None, 1.5]),
        ('"FF"', "\ufffd"),
    ],
)
async def test_an_answer_that_lenient_clients_take_is_mended(result: str, found: Any) -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        line = '{"jsonrpc":"2.0","id":ID,"result":{"x":' + result + "}}"
        assert (await call(talker, "answers", line=line))["x"] == found
        assert text(await call(talker, "echo", 2)) == "{}"


@pytest.mark.parametrize(
    "line",
    [
        '{"id":ID,"result":{"x":1}}',
        '{"jsonrpc":"2.0","id":ID.0,"result":{"x":1}}',
        '{"jsonrpc":"2.0","id":"ID","result":{"x":1}}',
        '\ufeff{"jsonrpc":"2.0","id":ID,"result":{"x":1}}\r',
        '{"result":{"x":1},"id":ID}',
    ],
)
async def test_an_envelope_with_usual_faults_is_understood(line: str) -> None:
    async with wrapped() as (house, _):
        assert await call(await house.dial(PLAIN), "answers", line=line) == {"x": 1}


@pytest.mark.parametrize(
    "line",
    [
        '{"jsonrpc":"2.0","id":ID}',
        '{"jsonrpc":"2.0","id":ID,"result":{"x":1}',
        '{"jsonrpc":"2.0","id":ID,"result":' + "[" * 50_000 + "]" * 50_000 + "}",
        '{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"no"}}',
    ],
)
async def test_no_answer_leaves_its_call_waiting(line: str) -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        await talker.call(1, "answers", line=line)
        answer = await talker.answer(1)
        assert "error" in answer
        assert text(await call(talker, "echo", 2)) == "{}"


async def test_a_question_without_params_has_none() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(ASKING)
        line = '{"jsonrpc":"2.0","id":0,"method":"roots/list"}'
        await talker.call(1, "garbage", n=1, line=line.replace("{", "{{").replace("}", "}}"))
        question = await talker.find(asks("roots/list"))
        assert question.keys() == {"jsonrpc", "id", "method"}


async def test_a_notification_with_a_newline_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "log"
    async with wrapped(does={"log": file}) as (house, _), surfing(house, PLAIN) as web:
        await web.fetch("POST", b'{"jsonrpc":"2.0",\n"method":"acme"}\r\n')
        await web.call_tool("echo")
        lines = file.read_bytes().split(b"\n")
        assert b'{"jsonrpc":"2.0","method":"acme"}' in lines
        assert b"" not in lines[:-1]


# Garbage, floods and long lines


async def test_garbage_is_dropped() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        assert text(await call(talker, "garbage", n=100)) == "done"
        for number, line in enumerate(["1", '"x"', "{{}}", '{{"a":1}}', "[1]", "[]", "\xff"]):
            assert text(await call(talker, "garbage", number, n=10, line=line)) == "done"
        assert methods(talker) == []


async def test_nothing_but_garbage_is_no_mcp_server() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        error = await call(talker, "garbage", n=101)
        assert error["data"]["reason"] == "interrupted"
        assert "no MCP server" in error["message"]


async def test_a_batch_is_several_messages() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        line = '[{{"jsonrpc":"2.0","method":"a"}},{{"jsonrpc":"2.0","method":"b"}}]'
        await call(talker, "garbage", n=1, line=line)
        assert methods(talker) == ["a", "b"]


@pytest.mark.parametrize("kind", ["result last", "id last"])
async def test_a_line_that_is_too_long_ends_its_call_alone(kind: str) -> None:
    async with wrapped(message_bytes_max=1 << 20) as (house, _):
        talker = await house.dial(PLAIN)
        await talker.call(1, "never")
        error = await call(talker, "huge", 2, bytes=100 << 20, **{"as": kind})
        assert error["data"] == {"reason": "too_large", "limit": 1 << 20}
        assert "--max-message-bytes" in error["message"]
        assert text(await call(talker, "echo", 3)) == "{}"
        assert not any(each.get("id") == 1 for each in talker.seen)


async def test_a_notification_that_is_too_long_is_dropped() -> None:
    async with wrapped(message_bytes_max=1 << 20) as (house, _):
        talker = await house.dial(PLAIN)
        assert text(await call(talker, "huge", bytes=2 << 20, **{"as": "notification"})) == "done"
        answer = said(await call(talker, "huge", 2, bytes=2 << 20, **{"as": "question"}))
        assert methods(talker) == []
        assert answer["error"]["data"] == {"reason": "too_large", "limit": 1 << 20}


async def test_a_flood_is_slowed_by_a_reader_that_is_behind() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN, capacity=4096)
        await talker.call(1, "flood", n=5000)
        await talker.answer(1)
        assert methods(talker) == ["notifications/message"] * 5000


async def test_a_child_that_does_not_read_delays_no_other_session() -> None:
    async with wrapped() as (house, _):
        deaf, other = await house.dial(PLAIN), await house.dial(PLAIN, "bob")
        assert text(await call(deaf, "deaf", s=2)) == "done"
        for number in range(8):
            await deaf.call(10 + number, "echo", a="x" * (1 << 20))
        for _ in range(20):
            await deaf.tell("notifications/acme", a="x" * (1 << 18))
        assert text(await call(other, "echo")) == "{}"
        awaited = {*range(10, 18)}
        while awaited:
            awaited.discard((await deaf.read()).get("id"))
