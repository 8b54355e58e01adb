"""The log names a handler that blocks all others, and no handler that lets others run."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from streams.process.watchdog import watched
from tests.rigs import HERE
from tests.wire.process import Gate, ServerProcess, gate_in
from tests.wire.verbs import POSITIONS

APP = HERE / "blocking_server.py"
BLOCKED, OVER = "a handler blocks all connections", "the handler has ended its turn"
PATIENCE_S = 0.3


def serving(folder: Path, patience_s: float = PATIENCE_S) -> ServerProcess:
    options = ("--watchdog", str(patience_s), "--json")
    return ServerProcess(folder, app=f"{APP}:server", options=options)


def call(server: ServerProcess, tool: str, gate: Gate, *awaited: str) -> None:
    """Call a tool and, once the log has said all that is awaited, let it go on."""
    with server.connect("ws-streams") as peer:
        peer.initialize(POSITIONS)
        request = peer.call(tool, gate=gate.path)
        if not awaited:
            assert peer.ask("ping").result == {}
        for what in awaited:
            server.hear(what)
        gate.release()
        assert peer.response(request).result["content"][0]["text"] == "went on"


def said(server: ServerProcess, what: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log if what in line]


def blocking_line() -> int:
    lines = APP.read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if "the line that the warning" in line)


def test_a_handler_that_holds_up_everybody_is_named_once_and_when_it_is_over(
    tmp_path: Path,
) -> None:
    with serving(tmp_path) as server, gate_in(tmp_path / "gate") as gate:
        call(server, "block", gate, BLOCKED)
        server.hear(OVER)
        assert server.stop() == 0
        [blocked], [over] = said(server, BLOCKED), said(server, OVER)
    assert blocked["tool"] == over["tool"] == "block"
    assert blocked["at"] == over["at"] == f"{APP}:{blocking_line()} in stand"
    assert blocked["for_s"] == PATIENCE_S
    assert over["took_s"] >= PATIENCE_S
    assert blocked["level"] == "warning"


@pytest.mark.parametrize("tool", ["await_thread", "wait"])
def test_a_handler_that_waits_as_it_should_is_not_named(tmp_path: Path, tool: str) -> None:
    with serving(tmp_path) as server, gate_in(tmp_path / "gate") as gate:
        call(server, tool, gate)
        assert server.stop() == 0
        assert not [line for line in said(server, BLOCKED) if line.get("tool") == tool]


async def test_without_patience_nothing_is_watched() -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate()]

    with watched(0, lambda _: None):
        assert "mcp-streams watchdog" not in threads()
    with watched(60, lambda _: None):
        assert "mcp-streams watchdog" in threads()
