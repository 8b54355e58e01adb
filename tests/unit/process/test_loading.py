"""The errors of `mcp-streams serve` for a file that cannot be served."""

import sys
from pathlib import Path

import pytest

from streams.process.loading import load
from streams.process.options import CannotServe, Options

HEAD = """
from streams import Server

server = Server("tested")
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "app", raising=False)
    return tmp_path / "app.py"


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("@server.tool\ndef build(*rows): ...", 6),  # a check of the library's raises
        ("1 / 0", 6),
    ],
)
def test_a_failure_names_the_line_of_the_author(app: Path, body: str, line: int) -> None:
    app.write_text(f"{HEAD}\n{body}\n")
    with pytest.raises(CannotServe, match=r"app\.py cannot be imported: ") as raised:
        load(Options(app=f"{app}:server"))
    assert str(raised.value).endswith(f"({app}, line {line}).")
