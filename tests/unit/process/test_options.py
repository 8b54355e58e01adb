"""The options of a server process."""

import ast
from pathlib import Path

from streams.logs import room_of
from streams.observe.calls import LOGGER
from streams.process.options import LOGGERS, levels_of
from tests.rigs import ROOT

# A module that imports any of these writes lines, which have the name of its package.
WRITERS = {
    ("streams.logs", "log"),
    ("streams.logs", "Warnings"),
    ("streams.faults", "log_failure"),
}


def writes(file: Path) -> bool:
    return any(
        (node.module, name.name) in WRITERS
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    )


def test_each_package_that_writes_lines_is_a_logger_with_a_level() -> None:
    files = [file for top in ("streams", "transports") for file in (ROOT / top).rglob("*.py")]
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if writes(file)
    ]
    # Lines of these modules belong to their caller.
    rooms = {room_of(module) for module in modules} - {"logs", "faults"}
    assert set(LOGGERS) == rooms | {LOGGER}
    assert levels_of(["webhooks=debug"]) == {"webhooks": "debug"}
