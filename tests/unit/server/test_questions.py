"""Typed questions of a tool: elicitation, sampling and roots."""

import base64
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
import pydantic
import pytest
import trio
from trio.testing import MockClock

from streams import (
    AcceptedElicitation,
    Call,
    CallFailed,
    CancelledElicitation,
    DeclinedElicitation,
    Image,
    InvalidAnswer,
    MissingCapability,
    Server,
    SyncCall,
    Text,
)
from streams.schemas.forms import form_of
from tests.rigs.server import Json, open_house, text_of
from tests.unit.engine.test_restarts import Lives, rest_of

ABLE: Json = {"elicitation": {"form": {}, "url": {}}, "sampling": {}, "roots": {}}


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


@dataclass
class Confirm:
    sure: bool
    why: str = "because"


class Order(msgspec.Struct):
    count: Annotated[int, msgspec.Meta(ge=1, title="How many?")]
    size: Size
    colour: Literal["red", "blue"] = "red"
    extras: list[Literal["ribbon", "card"]] = []
    day: date | None = None
    weight: float | None = None


class Address(TypedDict):
    street: str
    zip: NotRequired[str]


class Contact(pydantic.BaseModel):
    email: Annotated[str, pydantic.Field(description="Where to?", min_length=3)]
    size: Size = Size.SMALL
    age: int | None = pydantic.Field(None, ge=0)


class Nested(msgspec.Struct):
    order: Order


@dataclass
class Listed:
    names: list[str] = field(default_factory=list)


class Mixed(msgspec.Struct):
    either: int | str


class Numbers(msgspec.Struct):
    one: Literal[1, 2]


class NestedModel(pydantic.BaseModel):
    contact: Contact


@dataclass
class Bounded:
    count: Annotated[int, pydantic.Field(ge=1, description="How many?")]
    day: date = pydantic.Field(date(2026, 1, 1), title="When?")  # noqa: RUF009


@pydantic.dataclasses.dataclass
class Theirs:
    count: Annotated[int, pydantic.Field(ge=1)]


class Odd(pydantic.BaseModel):
    model_config = {"arbitrary_types_allowed": True}

    event: trio.Event


class Row(msgspec.Struct, array_like=True):
    one: int


class Parcel(msgspec.Struct):
    code: Annotated[str, msgspec.Meta(pattern="^(a+)+$")]  # takes `re` 2 ** length steps
    also: Annotated[str, msgspec.Meta(pattern="^b{1,8}$")] | None = None


class Backtracking(msgspec.Struct):
    code: Annotated[str, msgspec.Meta(pattern=r"^(a)\1$")]


# Forms


def test_a_form_is_what_mcp_allows() -> None:
    assert form_of(Order).schema == {
        "type": "object",
        "properties": {
            "count": {"type": "integer", "title": "How many?", "minimum": 1},
            "size": {"type": "string", "title": "Size", "enum": ["large", "small"]},
            "colour": {"type": "string", "default": "red", "enum": ["blue", "red"]},
            "extras": {
                "type": "array",
                "default": [],
                "items": {"type": "string", "enum": ["card", "ribbon"]},
            },
            "day": {"type": "string", "format": "date"},
            "weight": {"type": "number"},
        },
        "required": ["count", "size"],
    }
    assert form_of(Contact).schema == {
        "type": "object",
        "properties": {
            "email": {
                "type": "string",
                "title": "Email",
                "description": "Where to?",
                "minLength": 3,
            },
            "size": {
                "type": "string",
                "title": "Size",
                "default": "small",
                "enum": ["small", "large"],
            },
            "age": {"type": "integer", "title": "Age", "minimum": 0},
        },
        "required": ["email"],
    }
    assert form_of(Address).schema["required"] == ["street"]
    bounded = form_of(Bounded).schema["properties"]
    assert bounded["count"]["minimum"] == form_of(Theirs).schema["properties"]["count"]["minimum"]
    assert (bounded["count"]["description"], bounded["day"]["title"]) == ("How many?", "When?")
    assert bounded["day"]["default"] == "2026-01-01"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Nested, r"Nested\.order cannot be in a form"),
        (Listed, r"Listed\.names cannot be in a form: a list of a form has only items of an enum"),
        (Mixed, r"Mixed\.either cannot be in a form"),
        (Numbers, r"Numbers\.one cannot be in a form: an enum of a form has only strings"),
        (NestedModel, r"NestedModel\.contact cannot be in a form"),
        (Row, "Row cannot be a form: expected a dataclass"),
        (int, "int cannot be a form"),
        (list[str], "cannot be a form"),
        (trio.Event, "Event cannot be a form"),
        (Odd, "Odd cannot be a form"),
        (Backtracking, "Backtracking cannot be a form: .* patterns are matched in linear time"),
        ({"type": "object"}, "response_type: expected a class, got dict"),
        (["yes", "no"], "response_type: expected a class, got list"),
    ],
)
async def test_what_is_not_flat_is_refused_before_it_is_sent(kind: Any, why: str) -> None:
    async def ask(call: Call) -> str:
        with pytest.raises(TypeError, match=why):
            await call.elicit("?", kind)
        return "refused"

    assert await asked(ask) == "refused"


# Answers


Ask = Callable[[Call], Any]


async def asked(
    ask: Ask,
    *answers: Any,
    capabilities: Json = ABLE,
    seen: list[Json] | None = None,
    server: Server | None = None,
) -> str:
    """The text of a tool that asks; the client gives these answers in turn."""
    server = server or Server("tested")
    server.tool(name="ask")(ask)
    async with open_house(server) as house:
        talker = await house.dial(capabilities)
        await talker.call(1, "ask")
        for answer in answers:
            question = await talker.find(lambda m: "id" in m and "method" in m)
            if seen is not None:
                seen.append(question)
            said = {"error": answer} if "code" in answer else {"result": answer}
            await talker.say({"id": question["id"]} | said)
        return text_of(await talker.answer(1))


async def confirm(call: Call) -> str:
    result = await call.elicit("Ship it?", Confirm)
    match result:
        case AcceptedElicitation(data=data):
            return repr(data)
        case DeclinedElicitation():
            return result.action
        case CancelledElicitation():
            return result.action


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        ({"action": "accept", "content": {"sure": True}}, "Confirm(sure=True, why='because')"),
        ({"action": "decline"}, "decline"),
        ({"action": "decline", "content": {"sure": 1}}, "decline"),
        ({"action": "cancel", "content": None}, "cancel"),
    ],
)
async def test_an_answer_has_the_type_that_was_asked_for(answer: Json, result: str) -> None:
    seen: list[Json] = []
    assert await asked(confirm, answer, seen=seen) == result
    assert seen[0]["method"] == "elicitation/create"
    assert seen[0]["params"] == {
        "message": "Ship it?",
        "requestedSchema": {
            "type": "object",
            "properties": {
                "sure": {"type": "boolean"},
                "why": {"type": "string", "default": "because"},
            },
            "required": ["sure"],
        },
    }


@pytest.mark.parametrize(
    ("kind", "content", "result"),
    [
        (Order, {"count": 2, "size": "large"}, "large 2"),
        (Address, {"street": "High"}, "High"),
        (Contact, {"email": "a@b", "age": None}, "a@b"),
    ],
)
async def test_every_kind_of_type_can_be_asked_for(kind: Any, content: Json, result: str) -> None:
    async def ask(call: Call) -> str:
        found = await call.elicit("?", kind)
        assert isinstance(found, AcceptedElicitation)
        data = found.data
        if isinstance(data, Order):
            return f"{data.size.value} {data.count}"
        if isinstance(data, Contact):
            return data.email
        return str(data["street"])

    assert await asked(ask, {"action": "accept", "content": content}) == result


@pytest.mark.parametrize(
    "answer",
    [
        {"action": "accept", "content": {"sure": "yes"}},
        {"action": "accept", "content": {}},
        {"action": "accept"},
        {"action": "accept", "content": []},
        {"action": "perhaps"},
        {},
    ],
)
async def test_an_answer_that_does_not_fit_can_be_caught(answer: Json) -> None:
    async def ask(call: Call) -> str:
        try:
            return await confirm(call)
        except ValueError as error:
            return f"caught: {error}"

    assert (await asked(ask, answer)).startswith("caught: The client's answer ")
    assert (await asked(confirm, answer)).startswith("The client's answer ")


@pytest.mark.parametrize(
    ("kind", "content"), [(Contact, {"email": ""}), (Bounded, {"count": 0}), (Theirs, {"count": 0})]
)
async def test_a_model_that_refuses_an_answer_can_be_caught(kind: Any, content: Json) -> None:
    async def ask(call: Call) -> str:
        with pytest.raises(InvalidAnswer, match=f"The client's answer is no {kind.__name__}"):
            await call.elicit("?", kind)
        return "caught"

    assert await asked(ask, {"action": "accept", "content": content}) == "caught"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"code": "a" * 60 + "!"}, "does not match"),
        ({"code": "a", "also": "c"}, "also: .* does not match"),
        ({"code": "a", "also": "b" * 10_000}, "also: 10000 characters are too many"),
        ({"code": 1}, "Expected `str`, got `int`"),
        ([], "Expected `object`, got `array`"),
    ],
)
async def test_patterns_of_a_form_are_matched_in_linear_time(content: Any, why: str) -> None:
    async def ask(call: Call) -> str:
        with pytest.raises(InvalidAnswer, match=f"The client's answer is no Parcel: .*{why}"):
            await call.elicit("?", Parcel)
        return "caught"

    assert await asked(ask, {"action": "accept", "content": content}) == "caught"


async def test_an_answer_that_matches_its_patterns_is_taken() -> None:
    async def ask(call: Call) -> str:
        answer = await call.elicit("?", Parcel)
        assert isinstance(answer, AcceptedElicitation)
        return f"{answer.data.code} {answer.data.also}"

    content = {"code": "aaa", "also": None}
    assert await asked(ask, {"action": "accept", "content": content}) == "aaa None"


async def test_a_question_may_ask_for_nothing_but_consent() -> None:
    async def ask(call: Call) -> str:
        result = await call.elicit("Sure?")
        assert isinstance(result, AcceptedElicitation)
        return repr(result.data)

    seen: list[Json] = []
    assert await asked(ask, {"action": "accept"}, seen=seen) == "None"
    assert seen[0]["params"]["requestedSchema"] == {"type": "object", "properties": {}}


async def test_a_question_at_a_url() -> None:
    async def ask(call: Call) -> str:
        return (await call.elicit_url("Pay there.", "https://pay.example/7", "pay-7")).action

    seen: list[Json] = []
    assert await asked(ask, {"action": "accept"}, seen=seen) == "accept"
    assert seen[0]["params"] == {
        "mode": "url",
        "message": "Pay there.",
        "url": "https://pay.example/7",
        "elicitationId": "pay-7",
    }


async def test_a_sample_has_a_type() -> None:
    async def ask(call: Call) -> str:
        sample = await call.sample(
            ["Draw.", Image(b"png", "image/png"), {"role": "assistant", "content": Text("How?")}],
            max_tokens=100,
            system_prompt="Be brief.",
            temperature=0.5,
            stop_sequences=["END"],
            include_context="none",
        )
        assert sample.content[1] == Image(b"gif", "image/gif")
        assert sample.content[2] == {"type": "tool_use", "id": "1", "name": "x", "input": {}}
        return f"{sample.text} {sample.model} {sample.stop_reason} {sample.role}"

    blocks = [
        {"type": "text", "text": "Here."},
        {"type": "image", "data": base64.b64encode(b"gif").decode(), "mimeType": "image/gif"},
        {"type": "tool_use", "id": "1", "name": "x", "input": {}},
    ]
    answer = {"role": "assistant", "content": blocks, "model": "m", "stopReason": "endTurn"}
    seen: list[Json] = []
    assert await asked(ask, answer, seen=seen) == "Here. m endTurn assistant"
    assert seen[0]["method"] == "sampling/createMessage"
    assert seen[0]["params"] == {
        "messages": [
            {"role": "user", "content": {"type": "text", "text": "Draw."}},
            {
                "role": "user",
                "content": {
                    "type": "image",
                    "data": base64.b64encode(b"png").decode(),
                    "mimeType": "image/png",
                },
            },
            {"role": "assistant", "content": {"type": "text", "text": "How?"}},
        ],
        "maxTokens": 100,
        "systemPrompt": "Be brief.",
        "temperature": 0.5,
        "stopSequences": ["END"],
        "includeContext": "none",
    }


async def test_a_sample_of_one_text() -> None:
    async def ask(call: Call) -> str:
        return (await call.sample("Hello?")).text

    seen: list[Json] = []
    answer = {"role": "assistant", "content": {"type": "text", "text": "Yes."}, "model": "m"}
    assert await asked(ask, answer, seen=seen) == "Yes."
    assert seen[0]["params"]["maxTokens"] == 1024


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"role": "assistant", "content": "text", "model": "m"},
        {"role": "assistant", "content": {"type": "text"}, "model": "m"},
        {"role": "assistant", "content": {"type": "image", "data": "?", "mimeType": "x"}},
        {"role": "nobody", "content": [], "model": "m"},
    ],
)
async def test_a_sample_that_does_not_fit_can_be_caught(answer: Json) -> None:
    async def ask(call: Call) -> str:
        with pytest.raises(InvalidAnswer, match="sampling/createMessage does not fit"):
            await call.sample("?")
        return "caught"

    assert await asked(ask, answer) == "caught"


async def test_what_cannot_be_a_sample_is_refused() -> None:
    async def ask(call: Call) -> str:
        with pytest.raises(ValueError, match="max_tokens"):
            await call.sample("?", max_tokens=0)
        with pytest.raises(TypeError, match="unknown options of a sample: warmth"):
            await call.sample("?", warmth=1)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="role and content"):
            await call.sample({"text": "?"})
        with pytest.raises(TypeError, match="not int"):
            await call.sample([1])  # type: ignore[list-item]
        return "refused"

    assert await asked(ask) == "refused"


async def test_the_roots_of_a_client() -> None:
    async def ask(call: Call) -> str:
        return repr([(root.uri, root.name) for root in await call.roots()])

    roots = [{"uri": "file:///a", "name": "a", "_meta": {}}, {"uri": "file:///b"}]
    assert await asked(ask, {"roots": roots}) == "[('file:///a', 'a'), ('file:///b', None)]"


async def test_an_error_of_the_client_can_be_caught() -> None:
    async def ask(call: Call) -> str:
        with pytest.raises(CallFailed) as failed:
            await call.elicit("?", Confirm)
        return f"{failed.value.code} {failed.value.message}"

    assert await asked(ask, {"code": -1, "message": "no user"}) == "-1 no user"


async def test_a_plain_function_asks_the_same() -> None:
    server = Server("tested")

    @server.tool
    def ask(call: SyncCall) -> str:
        found = call.elicit("?", Confirm)
        assert isinstance(found, AcceptedElicitation)
        url = call.elicit_url("?", "https://x.example", "1")
        return f"{found.data.sure} {url.action} {call.sample('?').text} {call.roots()[0].uri}"

    async with open_house(server) as house:
        talker = await house.dial(ABLE)
        await talker.call(1, "ask")
        for answer in (
            {"action": "accept", "content": {"sure": False}},
            {"action": "cancel"},
            {"role": "assistant", "content": {"type": "text", "text": "Yes."}, "model": "m"},
            {"roots": [{"uri": "file:///a"}]},
        ):
            question = await talker.read()
            await talker.say({"id": question["id"], "result": answer})
        assert text_of(await talker.answer(1)) == "False cancel Yes. file:///a"


# Capabilities


@pytest.mark.parametrize(
    ("capabilities", "lacks"),
    [
        ({}, ["elicitation.form", "elicitation.url", "sampling", "roots"]),
        ({"elicitation": {}}, ["elicitation.url", "sampling", "roots"]),
        ({"elicitation": {"url": {}}, "roots": {}}, ["elicitation.form", "sampling"]),
        (ABLE, []),
    ],
)
async def test_a_client_that_cannot_answer_is_not_asked(
    capabilities: Json, lacks: list[str]
) -> None:
    async def ask(call: Call) -> list[str]:
        missing = []
        for question in (
            call.elicit("?", Confirm),
            call.elicit_url("?", "https://x.example", "1"),
            call.sample("?"),
            call.roots(),
        ):
            try:
                await question
            except MissingCapability as error:
                missing.append(error.data["capability"])
            except InvalidAnswer:
                pass
        return missing

    answers = [{}] * (4 - len(lacks))
    assert await asked(ask, *answers, capabilities=capabilities) == str(lacks).replace(
        "'", '"'
    ).replace(", ", ",")


async def test_an_uncaught_lack_is_told_to_the_model() -> None:
    text = await asked(confirm, capabilities={})
    assert text == (
        "The client cannot answer elicitation/create: it has not declared the capability "
        "elicitation.form (code -32601)"
    )


async def test_the_client_that_has_resumed_may_be_able(autojump_clock: MockClock) -> None:
    server = Server("tested", announce_after_s=0)

    @server.tool
    async def ask(call: Call) -> str:
        await trio.sleep(100)
        return await confirm(call)

    async with open_house(server) as house:
        talker = await house.dial({"streams": {}})
        stream = await talker.begin(1, "ask")
        await talker.leave()
        other = await house.dial({"streams": {}} | ABLE)
        await other.ask(2, "stream/resume", streamId=stream["streamId"])
        question = await other.find(lambda m: m.get("method") == "elicitation/create")
        answer = {"action": "accept", "content": {"sure": True}}
        await other.say({"id": question["id"], "result": answer})
        assert text_of(await other.answer(1)).startswith("Confirm(sure=True")


# Restarts


async def test_answers_are_recalled_after_a_restart(autojump_clock: MockClock) -> None:
    lives, results = Lives(), []

    async def work(call: Call) -> str:
        results.append(await confirm(call))
        await call.notify("count", {"n": 1})
        if len(results) == 1:
            await trio.sleep_forever()
        return results[-1]

    capabilities = {"experimental": {"mcp-streams/v1": {"positions": True}}} | ABLE
    async with lives.house(work) as house:
        talker = await house.dial(capabilities)
        stream = await talker.begin(1, "step")
        question = await talker.find(lambda m: m.get("method") == "elicitation/create")
        answer = {"action": "accept", "content": {"sure": True}}
        await talker.say({"id": question["id"], "result": answer})
        await talker.find(lambda m: m.get("method") == "count")
        lives.die(house)
    async with lives.house(work) as house:
        came = await rest_of(house, stream)
    assert results == ["Confirm(sure=True, why='because')"] * 2
    assert text_of(next(m for m in came if m.get("id") == 1)) == results[0]


async def test_a_lack_is_the_same_after_a_restart(autojump_clock: MockClock) -> None:
    lives, lacks = Lives(), []

    async def work(call: Call) -> str:
        if lacks:
            await trio.sleep(100)  # until a client is attached that could answer
        try:
            await confirm(call)
        except MissingCapability as error:
            lacks.append(error.data)
        await call.notify("count", {"n": 1})
        if len(lacks) == 1:
            await trio.sleep_forever()
        return "done"

    positions = {"experimental": {"mcp-streams/v1": {"positions": True}}}
    async with lives.house(work) as house:
        talker = await house.dial(positions)
        stream = await talker.begin(1, "step")
        await talker.find(lambda m: m.get("method") == "count")
        lives.die(house)
    async with lives.house(work) as house:
        talker = await house.dial(positions | ABLE)
        came = await talker.resume(2, stream)
    assert text_of(next(m for m in came if m.get("id") == 1)) == "done"
    assert len(lacks) == 2
