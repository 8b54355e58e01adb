"""A forked child lets go of what is withheld, also where it may open nothing more."""

import subprocess
import sys

import pytest

from tests.wire.raw import DEADLINE_S

# The limit in the parent is the number of the first descriptor that it may not have.
FORKING = """
import os, resource, socket, sys
from streams.forks import in_child, withhold

pairs = [socket.socketpair() for _ in range(3)]
for _, ours in pairs:
    withhold(ours)
in_child(lambda: os.write(told, b"in_child "))
reading, told = os.pipe()
limit = {"all in use": told + 1, "none": 0}.get(sys.argv[1], 256)
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
child = os.fork()
if child == 0:
    for theirs, _ in pairs:
        theirs.close()
    os.write(told, b"as the tool")
    os.kill(os.getpid(), 19)  # SIGSTOP: it lives on
os.waitpid(child, os.WUNTRACED)
try:
    print(os.read(reading, 100).decode())
    for theirs, ours in pairs:
        ours.send(b"whole")  # the connection is the parent's, and open
        assert theirs.recv(10) == b"whole"
        ours.close()  # and the child has none of it
        assert theirs.recv(10, socket.MSG_DONTWAIT) == b""  # else BlockingIOError
finally:
    os.kill(child, 9)
"""


@pytest.mark.parametrize("may_open", ["more", "all in use", "none"])
def test_a_child_holds_no_connection_however_few_descriptors_it_may_have(may_open: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORKING, may_open],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "in_child as the tool\n"
