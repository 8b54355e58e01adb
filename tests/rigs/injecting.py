"""System faults, injected into a running process from outside: `strace --inject`."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.rigs.needing import lacking, needed


@contextmanager
def injected(pid: int, calls: str, fault: str, folder: Path) -> Iterator[Path]:
    """Inject the fault into these system calls of every thread of a process.

    Yields the file in which strace logs the calls. `fault` is in strace's words:
    `error=EIO:when=5+` fails the fifth call and all later ones, counted for each thread;
    `signal=KILL:when=3` kills at the third.
    """
    strace = needed("strace", "put faults into a process")
    noted = folder / "strace.txt"
    command = [strace, "-f", "-p", str(pid), "-o", str(noted)]
    command += ["-e", f"trace={calls}", "-e", f"inject={calls}:{fault}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        said = tracer.stderr.readline()
        if "attached" not in said:
            tracer.kill()
            lacking(f"strace may not look into processes here: {said}")
        try:
            yield noted
        finally:
            tracer.terminate()
