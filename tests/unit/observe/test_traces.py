"""Calls and deliveries have spans, by the conventions of OpenTelemetry for MCP."""

import json
from typing import Any, Final

import pytest
import trio
from opentelemetry import baggage, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Server
from streams.engine.events import CallBegan, Events
from streams.exchange import TraceHeaders
from streams.keys import Keyring
from streams.observe.tallies import OTHER
from streams.observe.traces import Traces
from streams.server.caller import CallerInfo, trace_in, with_trace
from tests.rigs.server import PLAIN, POSITIONS, Steps, Talker, named, open_house

TRACE: Final = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT: Final = f"00-{TRACE}-00f067aa0ba902b7-01"
HTTP: Final = "00-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-bbbbbbbbbbbbbbbb-01"
MAX_S: Final = 600.0


class Traced:
    """Traces whose spans stay in memory."""

    def __init__(self, *, are_names_ours: bool = True) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._reader = InMemoryMetricReader()
        meters = MeterProvider([self._reader], shutdown_on_exit=False)
        self.events = Events()
        self.traces = Traces(
            with_trace,
            trace_in,
            are_names_ours=are_names_ours,
            tracer_provider=provider,
            meter_provider=meters,
        )
        self.traces.listen_to(self.events)

    @property
    def spans(self) -> list[ReadableSpan]:
        """Those that have ended, in that order."""
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [each for each in self.spans if each.name == name]

    def only(self, name: str) -> ReadableSpan:
        (found,) = self.named(name)
        return found

    def metered(self, name: str) -> list[tuple[dict[str, Any], int]]:
        """The attributes and the count of each point of a histogram."""
        found = self._reader.get_metrics_data()
        assert found is not None
        return [
            (dict(point.attributes or {}), point.count)
            for resource in found.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name and metric.unit == "s"
            for point in metric.data.data_points  # type: ignore[union-attr]
        ]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def context(span: ReadableSpan) -> trace.SpanContext:
    found = span.get_span_context()
    assert found is not None
    return found


def linked(span: ReadableSpan) -> list[int]:
    """The ids of the spans that it is linked to."""
    return [each.context.span_id for each in span.links]


def happened(span: ReadableSpan) -> list[str]:
    return [each.name.removeprefix("mcp.streams.") for each in span.events]


@pytest.fixture
def traced() -> Traced:
    return Traced()


@pytest.fixture
def server() -> Server:
    return Server("tested", resume_min_s=0, resume_max_s=MAX_S, announce_after_s=0)


async def call(talker: Talker, id: int, tool: str, **meta: str) -> None:
    await talker.ask(id, "tools/call", name=tool, arguments={}, _meta=meta)


async def test_a_call_has_a_span_with_the_attributes_of_the_conventions(
    server: Server, traced: Traced
) -> None:
    steps = Steps(server)
    async with open_house(server, events=traced.events) as house:
        talker = await house.dial(PLAIN)
        await call(talker, 7, "step", traceparent=PARENT)
        steps.finish()
        await talker.answer(7)
    span = traced.only("tools/call step")
    told = attributes(span)
    assert len(told.pop("mcp_streams.stream")) == 8
    assert told == {
        "mcp.method.name": "tools/call",
        "gen_ai.tool.name": "step",
        "gen_ai.operation.name": "execute_tool",
        "jsonrpc.request.id": "7",
        "mcp.protocol.version": "2025-11-25",
        "mcp_streams.outcome": "completed",
    }
    assert span.kind is SpanKind.SERVER
    assert span.status.status_code is StatusCode.UNSET
    assert span.parent is not None
    assert trace.format_trace_id(span.parent.trace_id) == TRACE
    assert traced.spans == [span], "a delivery that tells nothing more has no span"


async def test_the_code_of_a_tool_runs_in_the_span_of_its_call(
    server: Server, traced: Traced
) -> None:
    seen = []

    @server.tool
    async def nested() -> str:
        seen.append((trace.get_current_span().get_span_context(), baggage.get_baggage("user")))
        return "done"

    @server.tool
    def threaded() -> str:
        seen.append((trace.get_current_span().get_span_context(), baggage.get_baggage("user")))
        return "done"

    async with open_house(server, events=traced.events) as house:
        talker = await house.dial(PLAIN)
        for number, tool in enumerate(("nested", "threaded")):
            await call(talker, number, tool, traceparent=PARENT, baggage="user=alice")
            await talker.answer(number)
        assert not trace.get_current_span().get_span_context().is_valid, "only there"
    spans = [traced.only(f"tools/call {tool}") for tool in ("nested", "threaded")]
    assert seen == [(context(span), "alice") for span in spans]


@pytest.mark.parametrize(
    ("own", "parent", "links"),
    [(PARENT, PARENT, [HTTP]), ("", HTTP, []), ("nonsense", HTTP, [])],
)
async def test_the_context_of_http_is_a_link_or_the_parent(
    server: Server, traced: Traced, own: str, parent: str, links: list[str]
) -> None:
    steps, events = Steps(server), Events()

    def as_over_http(event: Any) -> None:
        if isinstance(event, CallBegan):
            event = CallBegan(event.stream, "http", TraceHeaders(HTTP))
        traced.events.tell(event)

    events.listen(as_over_http)
    async with open_house(server, events=events) as house:
        talker = await house.dial(PLAIN)
        await call(talker, 1, "step", **({"traceparent": own} if own else {}))
        steps.finish()
        await talker.answer(1)
    span = traced.only("tools/call step")
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == parent.split("-")[2]
    assert [f"{each:016x}" for each in linked(span)] == [each.split("-")[2] for each in links]
    assert attributes(span)["network.protocol.name"] == "http"
    assert attributes(span)["network.transport"] == "tcp"


@pytest.mark.parametrize(
    ("tool", "error", "code"), [("wrong", "tool_error", None), ("large", "-32003", "-32003")]
)
async def test_an_error_is_told_by_its_type(
    server: Server, traced: Traced, tool: str, error: str, code: str | None
) -> None:
    @server.tool
    async def wrong() -> str:
        raise ValueError("a secret of the tool's")

    @server.tool
    async def large() -> str:
        return "x" * (server.limits.message_bytes_max + 1)

    async with open_house(server, events=traced.events) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, tool)
        answer = await talker.answer(1)
    span = traced.only(f"tools/call {tool}")
    if code is not None:
        code = error = str(answer["error"]["code"])
    assert attributes(span)["error.type"] == error
    assert attributes(span).get("rpc.response.status_code") == code
    assert span.status.status_code is StatusCode.ERROR
    assert "secret" not in span.to_json()


async def test_deliveries_are_linked_to_the_call_that_they_deliver(
    server: Server, traced: Traced
) -> None:
    steps = Steps(server)
    async with open_house(server, events=traced.events) as house:
        talker = await house.dial(POSITIONS)
        stream = await talker.begin(1, "step")
        await talker.leave()
        steps.log("one", "two")
        await wait_all_tasks_blocked()
        again = await house.dial(POSITIONS)
        await again.ask(2, "stream/resume", **named(stream), after=0)
        await again.find(lambda m: m.get("params", {}).get("data") == "two")
        steps.finish()
        await again.answer(1)
        await again.leave()
    span = traced.only("tools/call step")
    first, second = traced.named("mcp.streams.delivery")
    assert linked(first) == linked(second) == [context(span).span_id]
    assert first.parent is second.parent is None
    told = [
        tuple(attributes(each)[f"mcp_streams.{name}"] for name in ("after", "count", "replayed"))
        for each in (first, second)
    ]
    assert told == [(0, 0, 0), (0, 3, 2)]
    assert happened(span) == ["detached", "resumed"]
    assert first.start_time is not None
    assert first.end_time is not None
    assert first.start_time <= first.end_time


async def test_questions_are_events_of_the_call(server: Server, traced: Traced) -> None:
    steps = Steps(server)
    async with open_house(server, events=traced.events) as house:
        talker = await house.dial(POSITIONS)
        await talker.begin(1, "step")
        steps.ask()
        asked = await talker.find(lambda m: m.get("method") == "elicitation/create")
        await talker.say({"id": asked["id"], "result": {"action": "decline"}})
        steps.finish()
        await talker.answer(1)
    assert happened(traced.only("tools/call step")) == ["asked", "answered"]


async def test_a_rerun_is_a_span_linked_to_the_first_one(server: Server, traced: Traced) -> None:
    go, seen = trio.Event(), []

    @server.tool(restart=True)
    async def again(call: Call) -> str:
        seen.append(trace.get_current_span().get_span_context())
        await go.wait()
        return "done"

    keyring = Keyring.load(None)
    async with open_house(server, keyring=keyring, events=traced.events) as house:
        talker = await house.dial()
        await call(talker, 1, "again", traceparent=PARENT)
        await talker.announced()
        after_kill = house.as_after_a_crash()
    released = traced.only("tools/call again")
    assert attributes(released)["mcp_streams.outcome"] == "released"
    second = Traced()
    go.set()
    async with open_house(server, journal=after_kill, keyring=keyring, events=second.events):
        await wait_all_tasks_blocked()
    rerun = second.only("tools/call again")
    assert linked(rerun) == [context(released).span_id]
    assert context(rerun).trace_id == context(released).trace_id
    assert attributes(rerun)["mcp_streams.restart"] is True
    assert seen == [context(released), context(rerun)]


async def test_a_call_that_a_crash_has_ended_has_a_span_from_its_begin(
    server: Server, traced: Traced
) -> None:
    Steps(server)
    keyring = Keyring.load(None)
    async with open_house(server, keyring=keyring, events=traced.events) as house:
        talker = await house.dial()
        await call(talker, 1, "step", traceparent=PARENT)
        await talker.announced()
        after_kill = house.as_after_a_crash()
    second = Traced()
    async with open_house(server, journal=after_kill, keyring=keyring, events=second.events):
        pass
    span = second.only("tools/call step")
    assert attributes(span)["mcp_streams.outcome"] == "interrupted"
    assert span.parent is not None
    assert trace.format_trace_id(span.parent.trace_id) == TRACE
    first = traced.only("tools/call step")
    assert span.start_time is not None
    assert first.start_time is not None
    assert abs(span.start_time - first.start_time) < 1e9


async def test_a_call_that_no_client_wants_ends_its_span(
    server: Server, traced: Traced, autojump_clock: MockClock
) -> None:
    Steps(server)
    async with open_house(server, events=traced.events) as house:
        talker = await house.dial()
        await talker.begin(1, "step")
        await talker.tell("notifications/cancelled", requestId=1)
        await trio.sleep(1)
        await talker.begin(2, "step")
        await talker.leave()
        await trio.sleep(MAX_S)
    cancelled, abandoned = traced.named("tools/call step")
    assert "error.type" not in attributes(cancelled)
    assert attributes(abandoned)["error.type"] == "abandoned"


async def test_durations_of_calls_and_sessions_are_metered(server: Server, traced: Traced) -> None:
    steps = Steps(server)
    async with open_house(server, events=traced.events) as house:
        talker = await house.dial(PLAIN)
        for number, end in enumerate((steps.finish, steps.fail)):
            await talker.call(number, "step")
            end()
            await talker.answer(number)
        await talker.leave()
    usual = {
        "mcp.method.name": "tools/call",
        "gen_ai.tool.name": "step",
        "gen_ai.operation.name": "execute_tool",
        "mcp.protocol.version": "2025-11-25",
    }
    found = traced.metered("mcp.server.operation.duration")
    assert (usual, 1) in found
    assert ({**usual, "error.type": "tool_error"}, 1) in found
    sessions = traced.metered("mcp.server.session.duration")
    assert sessions == [({"mcp.protocol.version": "2025-11-25"}, 1)]


async def test_a_name_that_a_client_invents_is_no_attribute_of_a_metric(server: Server) -> None:
    traced, steps = Traced(are_names_ours=False), Steps(server)
    async with open_house(server, events=traced.events) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "step")
        steps.fail()
        await talker.answer(1)
    [(told, _)] = traced.metered("mcp.server.operation.duration")
    assert told["gen_ai.tool.name"] == OTHER


async def test_a_span_has_no_arguments_results_or_tokens(server: Server, traced: Traced) -> None:
    @server.tool
    async def keep(secret: str) -> str:
        return secret[::-1]

    async with open_house(server, events=traced.events) as house:
        talker = await house.dial(POSITIONS)
        stream = await talker.begin(1, "keep", secret="abcdefgh" * 3)
        await talker.answer(1)
    text = json.dumps([json.loads(span.to_json()) for span in traced.spans])
    for secret in ("abcdefgh", "hgfedcba", stream["streamId"], stream["resumeToken"]):
        assert secret not in text


def test_what_is_kept_of_a_caller_may_have_no_trace() -> None:
    kept = CallerInfo("os(1)", None, {}, None).kept()
    assert trace_in(kept) == trace_in(b"") == trace_in(b"\xff") == ""
