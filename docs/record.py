"""Makes `docs/recording.svg`, a real session in a terminal: `make recording`."""

import os
import pty
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

import pyte

HERE: Final = Path(__file__).resolve().parent
COLUMNS, ROWS = 96, 24
FONT, LINE, MARGIN = 14, 18, 14  # pixels
CHARACTER: Final = 8.43  # pixels: the width of one in the font
READ_S: Final = 1.2  # to read a command before it is run
LAST_S: Final = 5.0  # how long the last picture stays
TIMEOUT_S: Final = 60.0
PROMPT: Final = "$ "

SERVE: Final = (
    "mcp-streams serve reports.py:server --ws 127.0.0.1:8765 --journal reports.db 2> log &"
)


class Step(NamedTuple):
    """A command, and the number of seconds after which Ctrl-C is pressed."""

    command: str
    ctrl_c_s: float = 0.0


STEPS: Final = (
    Step(SERVE),
    Step("mcp-streams call ws://127.0.0.1:8765 build rows:=120", 3.0),
    Step("sleep 2  # the connection is gone, the tool works on"),
    Step("mcp-streams resume build-1", 2.0),
    Step('kill -9 "$(cat reports.db.lock)"; wait 2> /dev/null  # the server dies in the middle'),
    Step(SERVE),
    Step("mcp-streams resume build-1"),
)


class Shown(NamedTuple):
    """A line of the screen, from one second to another."""

    row: int
    text: str
    begin_s: float
    end_s: float


class Terminal:
    """A shell in a terminal, and all that its screen has shown."""

    def __init__(self, folder: str) -> None:
        self._screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self._now: dict[int, tuple[str, float]] = {}
        self.shown: list[Shown] = []
        ours, theirs = pty.openpty()
        self._terminal = ours
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PS1": PROMPT, "TERM": "xterm", "HOME": folder}
        environment |= {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "PYTHONUNBUFFERED": "1"}
        self._shell = subprocess.Popen(
            ["setsid", "--ctty", "bash", "--norc", "--noprofile", "-i"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env=environment,
        )
        os.close(theirs)
        self._began = time.monotonic()
        self._until_prompt()

    def play(self, step: Step) -> None:
        """Type a command, and wait for its end."""
        os.write(self._terminal, step.command.encode())
        self._watch(READ_S)
        os.write(self._terminal, b"\n")
        if step.ctrl_c_s:
            self._watch(step.ctrl_c_s)
            os.write(self._terminal, b"\x03")
        self._until_prompt()

    def close(self) -> None:
        """End the shell, and the server in it."""
        os.write(self._terminal, b"kill %1; wait; exit\n")
        self._shell.wait(TIMEOUT_S)

    def _until_prompt(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        self._watch(0.3)
        while self._line(self._screen.cursor.y) != PROMPT.rstrip():
            if time.monotonic() > deadline:
                sys.exit("\n".join(["no prompt:", *self._screen.display]))
            self._watch(0.1)

    def _watch(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self._terminal], [], [], left)[0]:
                self._stream.feed(os.read(self._terminal, 65536))
                self._note()

    def _line(self, row: int) -> str:
        line: str = self._screen.display[row]
        return line.rstrip()

    def _note(self) -> None:
        """Compare the screen with what it showed last."""
        now = time.monotonic() - self._began
        for row in range(ROWS):
            text, since = self._now.get(row, ("", 0.0))
            if (new := self._line(row)) != text:
                if text:
                    self.shown.append(Shown(row, text, since, now))
                self._now[row] = (new, now)

    def end(self) -> float:
        """Keep the last picture for a while; the length of the recording."""
        end = time.monotonic() - self._began + LAST_S
        self.shown += (Shown(row, text, at, end) for row, (text, at) in self._now.items() if text)
        return end


def drawn(shown: list[Shown], length_s: float) -> Iterator[str]:
    """The picture: each line is visible from its second to its end, over and over."""
    width, height = int(COLUMNS * CHARACTER + 2 * MARGIN), ROWS * LINE + 2 * MARGIN
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
    yield f' height="{height}" role="img" aria-labelledby="title"'
    yield ' font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"'
    yield f' font-size="{FONT}">'
    yield '<title id="title">A call is detached and resumed; its server is killed, and it is'
    yield " resumed again</title>"
    yield f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117">'
    yield f'<animate id="all" attributeName="x" from="0" to="0" dur="{length_s:.2f}s"'
    yield ' begin="0s;all.end"/></rect>'
    yield '<g fill="#e6edf3" style="white-space: pre">'
    for row, text, begin_s, end_s in sorted(shown, key=lambda each: each.begin_s):
        y = MARGIN + (row + 1) * LINE - 4
        yield f'<text x="{MARGIN}" y="{y}" visibility="hidden">{escape(text)}'
        yield f'<set attributeName="visibility" to="visible" begin="all.begin+{begin_s:.2f}s"'
        yield f' end="all.begin+{end_s:.2f}s"/></text>'
    yield "</g></svg>\n"


def main() -> None:
    """Play the session in an empty folder, and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        readme = (HERE.parent / "README.md").read_text()
        program = readme.partition("<<'END'\n")[2].partition("END\n")[0]
        (Path(folder) / "reports.py").write_text(program)
        terminal = Terminal(folder)
        for step in STEPS:
            terminal.play(step)
        length_s = terminal.end()
        terminal.close()
    (HERE / "recording.svg").write_text("".join(drawn(terminal.shown, length_s)))


if __name__ == "__main__":
    main()
