"""The end of a process: at its deadline, and in time."""

import os
import subprocess
import sys

import structlog

from streams.process.deadline import Exit


def test_the_last_words_name_tools_only_where_some_run() -> None:
    """Else it is another thread that has not ended, such as that of an exporter of telemetry."""
    end = Exit()
    with structlog.testing.capture_logs() as logged:
        end._tell(0)
        end.tools = lambda: ["build", "ship"]
        end._tell(0)
    alone, with_tools = logged
    assert "tools" not in alone["event"]
    assert "tools" not in alone
    assert "some tools have not ended" in with_tools["event"]
    assert with_tools["tools"] == "build, ship"


LEAVING = """
import atexit, threading, time
from streams.process.deadline import leave

class Freed:
    def __del__(self):
        print("freed", flush=True)

freed = Freed()
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("a thread"))).start()
leave(3)
"""


def test_a_process_that_leaves_waits_for_its_threads_and_frees_nothing() -> None:
    """Python frees its memory at the very end, and a daemon thread may wake meanwhile."""
    ran = subprocess.run(
        [sys.executable, "-c", LEAVING], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, "a thread\nat exit\n", "")


def test_a_process_that_leaves_says_that_its_output_is_lost() -> None:
    unread, output = os.pipe()
    os.close(unread)
    with os.fdopen(output, "wb") as stdout:
        ran = subprocess.run(
            [sys.executable, "-c", LEAVING],
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": ""},
            check=False,
        )
    assert (ran.returncode, b"BrokenPipeError" in ran.stderr) == (120, True)
