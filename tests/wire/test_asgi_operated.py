"""Operators of a server in an ASGI application have its log, metrics, and a grace at the end."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from tests.rigs.asgi import AsgiServer, MountedClient
from tests.wire.process import wait_until
from tests.wire.rawhttp import Exchange
from tests.wire.test_asgi import begun, counting, first_id, opened, progress

HOSTS = ("uvicorn", "hypercorn-trio")
OPEN_METRICS = "application/openmetrics-text;version=1.0.0"
LONG_S = "600"  # longer than a test waits for a process


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AsgiServer]:
    """Under uvicorn, with a grace that a test does not live to see the end of."""
    server = AsgiServer(tmp_path, app="operated")
    server.environment["GRACE_S"] = LONG_S
    with server:
        yield server


def lines(server: AsgiServer) -> list[dict[str, Any]]:
    """The lines of calls in the log."""
    return [json.loads(line) for line in server.log.splitlines() if '"logger":"calls"' in line]


def outcomes(server: AsgiServer) -> list[tuple[str, str]]:
    return [(line["event"], line.get("outcome", "")) for line in lines(server)]


def held(client: MountedClient, gate: Path, id: int | str = "held") -> tuple[Exchange, str]:
    """A call that ends with the gate, and its last event id."""
    call = client.call("held", id=id, gate=str(gate))
    first_id(call)
    return call, str(call.next_event().id)


def text_of(exchange: Exchange) -> str:
    """The text of the result that ends an event stream."""
    result = [event.message for event in exchange.events() if event.data][-1].result
    return str(result["content"][0]["text"])


def reason_of(exchange: Exchange) -> str:
    error = [event.message for event in exchange.events() if event.data][-1].error
    return str(error["data"]["reason"])


@pytest.mark.parametrize("host", HOSTS)
def test_the_framework_answers_with_the_metrics(host: str, tmp_path: Path) -> None:
    with AsgiServer(tmp_path, host=host, app="operated") as server, opened(server) as client:
        assert progress(counting(client, 3)) == [1, 2, 3]
        call = client.call("wait", id="waiting")
        first_id(call)
        answer = client.send(client.head("GET", path="/metrics")).head()
        assert answer.media_type == "text/plain"
        samples = [each for family in plain(answer.body().decode()) for each in family.samples]
        found = {each.name: each.value for each in samples if not each.labels}
        assert found["mcp_streams_calls_begun_total"] == 2
        assert found["mcp_streams_live"] == found["mcp_streams_ready"] == 1
        assert found["mcp_streams_loop_lag_seconds_count"] >= 0
        wants_other = {"Accept": OPEN_METRICS}
        answer = client.send(client.head("GET", wants_other, path="/metrics")).head()
        assert list(openmetrics(answer.body().decode()))


@pytest.mark.parametrize("host", HOSTS)
def test_the_log_has_a_line_for_a_call(host: str, tmp_path: Path) -> None:
    with AsgiServer(tmp_path, host=host, app="operated") as server, opened(server) as client:
        assert progress(counting(client, 3)) == [1, 2, 3]
        wait_until("the line is written", lambda: lines(server))
        [line] = lines(server)
        assert (line["event"], line["tool"], line["outcome"]) == (
            "call ended",
            "count",
            "completed",
        )
        assert (line["transport"], line["messages"]) == ("http", 4)


def test_a_call_that_runs_may_end_within_the_grace(server: AsgiServer, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with opened(server) as client:
        call, _ = held(client, gate)
        server.signal()
        gate.touch()
        assert text_of(call) == "released"
        assert server.wait() in (0, -signal.SIGTERM)
        assert outcomes(server)[-1] == ("call ended", "completed")


def test_a_grace_does_not_wait_for_calls_that_a_restart_continues(server: AsgiServer) -> None:
    with opened(server) as client:
        call = counting(client, 500)
        seen, last = begun(call, 20)
        assert server.end() in (0, -signal.SIGTERM)
        assert ("call released", "") in outcomes(server)
        for event in call.events(even_if_cut=True):
            last, data = str(event.id), event.data
            seen += [event.message.params["progress"]] if data else []
        server.start()
        seen += progress(client.get(last).head())
        assert seen == list(range(1, 501))


def test_a_second_signal_ends_the_grace(server: AsgiServer, tmp_path: Path) -> None:
    with opened(server) as client:
        call, last = held(client, tmp_path / "never")
        server.signal()
        assert server.end() in (0, -signal.SIGTERM)
        assert ("call interrupted", "") in outcomes(server)
        call.cut()
        server.start()
        assert reason_of(client.get(last).head()) == "interrupted"


def test_the_grace_has_an_end(tmp_path: Path) -> None:
    server = AsgiServer(tmp_path, app="operated")
    server.environment["GRACE_S"] = "0.1"
    with server, opened(server) as client:
        held(client, tmp_path / "never")
        assert server.end() in (0, -signal.SIGTERM)
        assert ("call interrupted", "") in outcomes(server)


def test_the_lifespan_gives_the_grace_where_no_signal_is_heard(tmp_path: Path) -> None:
    """hypercorn closes the connections first. A call that ends then is fetched from the next."""
    gate = tmp_path / "gate"
    server = AsgiServer(tmp_path, host="hypercorn-trio", app="operated")
    server.environment["GRACE_S"] = LONG_S
    with server, opened(server) as client:
        call, last = held(client, gate)
        os.kill(server.pid, signal.SIGTERM)
        assert call.events(even_if_cut=True) == []
        wait_until("the client is lost", lambda: ("call detached", "") in outcomes(server))
        gate.touch()
        assert server.wait() in (0, -signal.SIGTERM)
        assert outcomes(server)[-1] == ("call ended", "completed")
        server.start()
        assert text_of(client.get(last).head()) == "released"
