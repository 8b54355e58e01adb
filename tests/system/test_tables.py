"""An export to tables answers an operator's questions, with the commands of the documentation."""

import contextlib
import json
import re
import shlex
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streams.journal.records import Append, Create, Outcome
from streams.journal.sqlite import SQLiteStore
from streams.messages import Run
from tests.rigs import ROOT
from tests.rigs.command import run
from tests.rigs.doc_pages import free_port
from tests.rigs.sqlite import record

PAGE = ROOT / "docs" / "operate" / "operations.md"
INSTALL_S = 300.0
START_S = 60.0
ORIGIN = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"build"}}'
QUESTION = b'{"jsonrpc":"2.0","id":"q","method":"elicitation/create","params":{}}\n'
ERROR = b'{"jsonrpc":"2.0","id":1,"error":{"code":-32603,"message":"the disk is gone"}}\n'


TOOL_ERROR = (
    b'{"jsonrpc":"2.0","id":1,"result":'
    b'{"content":[{"type":"text","text":"no such branch"}],"isError":true}}\n'
)


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """The tables of a journal with a call that asks, one that has failed, and a tool's error."""
    journal = tmp_path / "reports.db"
    with contextlib.closing(SQLiteStore(journal)) as store:
        for number, (line, outcome) in enumerate(
            [
                (QUESTION, Outcome.LIVE),
                (ERROR, Outcome.FAILED),
                (TOOL_ERROR, Outcome.COMPLETED),
            ],
            1,
        ):
            name = f"stream-{number}"
            made = replace(record(number=number), stream=name, origin=ORIGIN)
            append = Append(name, 1, Run(1, 1, line), 0, 0, outcome, ended_at=1.8e9)
            assert store.commit([Create(made), append]) == [None, None]
        # The journal is in use.
        out = tmp_path / "look.db"
        done = run("export", str(journal), "--sqlite", str(out))
    assert done.returncode == 0, done.stderr
    return out


def questions() -> list[tuple[str, str]]:
    """The questions of the page, with the command that answers each of them."""
    found = re.findall(r"^\$ # (.*)\n\$ (sqlite-utils look\.db .*)$", PAGE.read_text(), re.M)
    assert len(found) == 5
    return found


@pytest.mark.parametrize(("question", "command"), questions())
def test_each_question_has_an_answer(question: str, command: str, tables: Path) -> None:
    words = shlex.split(command)
    done = subprocess.run(
        [str(Path(sys.executable).with_name(words[0])), *words[1:]],
        cwd=tables.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = json.loads(done.stdout)
    assert rows, question
    expected: dict[str, Any] = {
        "How do": {"tool": "build", "outcome": "live", "calls": 1},
        "Which calls": {"stream": 1, "tool": "build"},
        "Which callers": {"messages": 3, "bytes": sum(map(len, (QUESTION, ERROR, TOOL_ERROR))) - 3},
        "Which questions": {"stream": 1, "seq": 1, "method": "elicitation/create"},
        "Why": {"tool": "build", "why": "the disk is gone", "calls": 1},
    }
    (wanted,) = (row for start, row in expected.items() if question.startswith(start))
    assert any(wanted.items() <= row.items() for row in rows), rows
    if question.startswith("Why"):
        assert {"tool": "build", "why": "no such branch", "calls": 1} in rows


def test_the_end_of_a_call_has_a_time(tables: Path) -> None:
    done = run("export", str(tables.with_name("reports.db")))
    assert '"endedAt":1800000000.0' in done.stdout


@contextlib.contextmanager
def datasette(tables: Path, folder: Path) -> Iterator[int]:
    """Datasette over the tables, in an environment of its own; yields its port."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=INSTALL_S)
    install = [
        str(folder / "bin" / "pip"),
        "install",
        "--quiet",
        "datasette==0.65.5",
        "setuptools<81",
    ]
    subprocess.run(install, check=True, timeout=INSTALL_S)
    port = free_port()
    command = [str(folder / "bin" / "datasette"), str(tables), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if b"running on" in line:
                    break
            yield port
        finally:
            process.kill()


@pytest.mark.timeout(2 * INSTALL_S)
def test_datasette_serves_the_tables(tables: Path, tmp_path: Path) -> None:
    with datasette(tables, tmp_path / "venv") as port:
        socket.create_connection(("127.0.0.1", port), START_S).close()
        url = f"http://127.0.0.1:{port}/look/messages.json?_shape=array&kind=error"
        with urllib.request.urlopen(url) as answer:
            (row,) = json.load(answer)
    assert (row["stream"], row["seq"], row["at"]) == (2, 1, "2027-01-15T08:00:00.000Z")
