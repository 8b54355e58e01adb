"""What the tests of the journal's file share: lines, journals, and programs that use them."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from streams.journal import Append, Create, Record
from streams.messages import Run
from streams.sqlite import (
    SQLiteStore,
)

ROOT = Path(__file__).parent.parent
PLENTY = 1024 * 1024


def record(stream: str = "s") -> Record:
    return Record(
        stream=stream,
        principal="os(0)",
        origin=b"{}",
        min_s=1.0,
        max_s=60.0,
        created_at=1.75e9,
        fence=1,
        is_announced=True,
    )


def append(first: int, last: int, stream: str = "s", line: bytes = b"{}") -> Append:
    count = last + 1 - first
    return Append(stream, 1, Run(first, count, (line + b"\n") * count), 0, 0)


def make_journal(path: Path) -> Path:
    """A journal with one stream of 500 lines, closed."""
    with closing(SQLiteStore(path)) as opened:
        assert opened.commit([Create(record()), append(1, 500, line=b"x" * 99)]) == [None, None]
    return path


def last_of(opened: SQLiteStore, stream: str = "s") -> int:
    """The seq of the last of the stream's lines, all of which are read."""
    last = 0
    while (run := opened.read(stream, last, bytes_max=PLENTY)) is not None:
        assert run.seq == last + 1
        last = run.last
    return last


@contextmanager
def running(program: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """Another process that runs `program`; killed at the end."""
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, args)]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


APPENDING = """
    import sys
    from pathlib import Path
    from streams.journal import Create
    from streams.sqlite import SQLiteStore
    from tests.sqlite_rig import append, record

    store = SQLiteStore(Path(sys.argv[1]), durability=sys.argv[2])
    store.commit([Create(record())])
    last = 0
    while True:
        count = 1 + last % 7
        assert store.commit([append(last + 1, last + count)]) == [None]
        last += count
        print(last, flush=True)
"""
