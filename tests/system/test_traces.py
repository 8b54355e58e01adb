"""`--otel`: a real server exports spans and metrics as the variables of OpenTelemetry say."""

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any, Final

from tests.rigs.command import Following, run
from tests.wire.process import wait_until
from tests.wire.raw import DEADLINE_S

APP: Final = '''
from pathlib import Path

import trio
from opentelemetry import trace

from streams import Call, Server

server = Server("traced")


@server.tool
async def short() -> str:
    """Answer."""
    return "done"


@server.tool(restart=True)
async def long(call: Call, file: str) -> str:
    """Note the span of this run; the second one ends."""
    span = trace.get_current_span().get_span_context()
    await call.flush()
    with Path(file).open("a") as notes:
        notes.write(f"{span.trace_id:032x} {span.span_id:016x}\\n")
    if len(Path(file).read_text().splitlines()) == 1:
        await trio.sleep_forever()
    return "done"
'''
CONSOLE: Final = {"OTEL_TRACES_EXPORTER": "console", "OTEL_METRICS_EXPORTER": "console"}
TRACE: Final = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT: Final = f"00-{TRACE}-00f067aa0ba902b7-01"
HTTP: Final = "00-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-bbbbbbbbbbbbbbbb-01"
HELLO: Final = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "traced", "version": "1"},
}

Json = dict[str, Any]


class Served:
    """A server with `--otel`, and the one session that it serves over HTTP."""

    def __init__(self, folder: Path) -> None:
        (folder / "app.py").write_text(APP)
        words = ("--http=127.0.0.1:0", f"--journal={folder / 'journal.db'}", "--otel")
        self.command = Following("serve", f"{folder / 'app.py'}:server", *words, env=CONSOLE)
        self.url = self.command.wait_for(r"http://127\.0\.0\.1:\d+/mcp")
        self._session: dict[str, str] = {}

    def ask(self, method: str, params: Json, **headers: str) -> Any:
        """Send a request, and return its open response."""
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        request = urllib.request.Request(
            self.url,
            data=json.dumps(body).encode(),
            headers={
                "Content-Type": "application/json",
                "Accept": "application/json, text/event-stream",
                **self._session,
                **headers,
            },
        )
        return urllib.request.urlopen(request, timeout=DEADLINE_S)

    def initialize(self) -> None:
        with self.ask("initialize", HELLO) as answer:
            self._session = {"Mcp-Session-Id": answer.headers["Mcp-Session-Id"]}
            answer.read()

    def leave(self) -> None:
        """End the session."""
        request = urllib.request.Request(self.url, headers=self._session, method="DELETE")
        urllib.request.urlopen(request, timeout=DEADLINE_S).close()

    def end(self) -> list[Json]:
        """SIGTERM; returns everything that was exported."""
        self.command.process.send_signal(signal.SIGTERM)
        code, out = self.command.end()
        assert code == 0
        decoder, found, at = json.JSONDecoder(), [], 0
        while at < len(out):
            value, at = decoder.raw_decode(out, at)
            found.append(value)
            at += len(out[at:]) - len(out[at:].lstrip())
        return found


def spans(exported: list[Json], name: str) -> list[Json]:
    return [each for each in exported if each.get("name") == name]


def histograms(exported: list[Json]) -> dict[str, list[Json]]:
    return {
        metric["name"]: metric["data"]["data_points"]
        for each in exported
        for resource in each.get("resource_metrics", ())
        for scope in resource["scope_metrics"]
        for metric in scope["metrics"]
    }


def test_a_call_over_http_is_exported_with_both_of_its_contexts(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.initialize()
    params = {"name": "short", "arguments": {}, "_meta": {"traceparent": PARENT}}
    with served.ask("tools/call", params, traceparent=HTTP) as answer:
        assert b"done" in answer.read()
    served.leave()
    exported = served.end()
    [span] = spans(exported, "tools/call short")
    assert span["context"]["trace_id"] == f"0x{TRACE}"
    assert span["parent_id"] == "0x00f067aa0ba902b7"
    assert [each["context"]["span_id"] for each in span["links"]] == ["0xbbbbbbbbbbbbbbbb"]
    assert span["kind"] == "SpanKind.SERVER"
    assert span["attributes"]["network.protocol.name"] == "http"
    assert span["resource"]["attributes"]["service.name"] == "mcp-streams"
    metered = histograms(exported)
    [operation] = metered["mcp.server.operation.duration"]
    assert operation["attributes"]["gen_ai.tool.name"] == "short"
    [session] = metered["mcp.server.session.duration"]
    assert session["attributes"]["network.transport"] == "tcp"
    assert served._session["Mcp-Session-Id"] not in json.dumps(exported)


def test_a_rerun_after_kill_9_is_linked_to_the_span_that_the_kill_took_along(
    tmp_path: Path,
) -> None:
    notes = tmp_path / "notes"

    def runs() -> list[list[str]]:
        return [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []

    served = Served(tmp_path)
    served.initialize()
    params = {"name": "long", "arguments": {"file": str(notes)}, "_meta": {"traceparent": PARENT}}
    with served.ask("tools/call", params):
        wait_until("the tool runs", runs)
        served.command.kill()
    served.command.end()
    served = Served(tmp_path)
    wait_until("the tool runs again", lambda: len(runs()) == 2)
    [rerun] = spans(served.end(), "tools/call long")
    first, second = runs()
    assert rerun["context"] == rerun["context"] | {
        "trace_id": f"0x{second[0]}",
        "span_id": f"0x{second[1]}",
    }
    assert first[0] == second[0] == TRACE
    assert [each["context"]["span_id"] for each in rerun["links"]] == [f"0x{first[1]}"]
    assert rerun["attributes"]["mcp_streams.outcome"] == "completed"


def test_an_exporter_that_is_not_installed_is_named(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    app = f"{tmp_path / 'app.py'}:server"
    done = run(
        "serve", app, "--http=127.0.0.1:0", "--otel", env={"OTEL_TRACES_EXPORTER": "nowhere"}
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "nowhere" in done.shown[-1]
    assert "pip install opentelemetry-exporter-otlp" in done.shown[-1]
