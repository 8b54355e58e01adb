"""Kills the children's process groups when this process is killed.

The kernel kills the children themselves then (PR_SET_PDEATHSIG), but not what they have started:
`npx` starts a shell, which starts the server. So a shell beside this process reads a pipe that
only this process and its newest child have open, and at the end of it kills each group in its list.

All functions run in the one thread that starts children.
"""

import contextlib
import os
import subprocess
from typing import Final

from streams.logs import log

END_S: Final = 1.0  # how long the shell may take to end

# A child enters itself, so that it is in the list even if this process dies at that moment.
_SCRIPT: Final = """
groups=
while read -r change group; do
    if [ "$change" = + ]; then
        groups="$groups $group"
    else
        kept=
        for each in $groups; do
            [ "$each" = "$group" ] || kept="$kept $each"
        done
        groups=$kept
    fi
done
for each in $groups; do
    kill -s KILL -- "-$each"
done
"""


class Guard:
    """The shell, which runs while there are children."""

    def __init__(self) -> None:
        self._shell: subprocess.Popen[bytes] | None = None
        self._children = 0  # those that start too
        self._groups: set[int] = set()

    def enter(self) -> int | None:
        """Prepare for one more child; returns the pipe that it writes `entry` into."""
        self._children += 1
        if self._shell is not None and self._shell.poll() is not None:
            self._close()  # it was killed: the next one takes over
        if self._shell is None:
            try:
                self._shell = subprocess.Popen(  # nosec B603 # our own script
                    ["/bin/sh", "-c", _SCRIPT],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    bufsize=0,
                    cwd="/",
                    env={},
                    start_new_session=True,
                )
            except OSError as error:
                log.warning("if this process is killed, servers may stay", why=str(error))
            for group in self._groups:
                self._write(entry(group))
        return self._pipe

    def add(self, group: int) -> None:
        """A child runs, and has entered itself."""
        self._groups.add(group)

    def remove(self, group: int) -> None:
        """A child has ended. Call this before it is reaped: then its number is still its own."""
        self._groups.discard(group)
        self._write(b"- %d\n" % group)

    def _write(self, line: bytes) -> None:
        if (pipe := self._pipe) is not None:
            with contextlib.suppress(OSError):  # the shell was killed
                os.write(pipe, line)

    def leave(self) -> None:
        """A child was reaped, or did not start. The shell ends with the last one."""
        self._children -= 1
        if self._children == 0:
            self._close()

    def _close(self) -> None:
        shell, self._shell = self._shell, None
        if shell is None or shell.stdin is None:
            return
        shell.stdin.close()
        try:
            shell.wait(END_S)
        except subprocess.TimeoutExpired:
            shell.kill()
            shell.wait()

    @property
    def _pipe(self) -> int | None:
        shell = self._shell
        return None if shell is None or shell.stdin is None else shell.stdin.fileno()


def entry(group: int) -> bytes:
    """The line by which a child enters its group."""
    return b"+ %d\n" % group
