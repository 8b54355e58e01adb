"""The relay: what a client spawns with `--stdio --journal FILE`.

It finds the journal's owner, or starts it in a session of its own, and hands over its standard
streams. So the work outlives the client's host, and the next process that a client spawns reaches
it. A client waits for this process to start, so nothing is imported here that takes time to load.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from streams.errors import JournalUnusable
from streams.journal.ownership import StarterLock, check_files, log_path, socket_path
from streams.permissions import open_own
from streams.process.options import READY, STARTER_VARIABLE, CannotServe, Options
from transports.relay.handover import AnotherUser, NoOwner, RelayRefused, relay
from transports.relay.standard import claim_standard_streams

# How long a relay looks for an owner, or waits for the one that somebody is starting.
OWNER_WAIT_S: Final = 30.0
OWNER_RETRY_S: Final = 0.05


def run(options: Options) -> None:
    """Bring the client to the journal's owner, and wait for their end. Raises `CannotServe`."""
    assert options.journal is not None
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, _go_on)
    _check_files(options.journal)
    fds = claim_standard_streams()
    starter = StarterLock(options.journal)
    give_up_at = time.monotonic() + OWNER_WAIT_S
    while True:
        try:
            relay(socket_path(options.journal), options.hello(), fds)
        except RelayRefused as refused:
            raise CannotServe(str(refused)) from refused
        except AnotherUser as stranger:
            raise CannotServe(f"{stranger}.") from stranger
        except NoOwner as nobody:
            if time.monotonic() > give_up_at:
                raise CannotServe(f"{nobody}: see {log_path(options.journal)}.") from nobody
        else:
            return
        _ensure_owner(options, starter)


def _go_on(*_: object) -> None:
    """A hangup of the terminal ends the client, and then the owner lets the relay go; to reload is
    the owner's business. A handler, since what ignores a signal passes that on to its children.
    """


def _check_files(journal: Path) -> None:
    try:
        check_files(journal)
    except JournalUnusable as error:
        raise CannotServe(str(error)) from error


def _ensure_owner(options: Options, starter: StarterLock) -> None:
    """Start an owner, or wait a little for the one that somebody else is starting."""
    try:
        is_ours_to_start = starter.acquire()
    except JournalUnusable as error:
        raise CannotServe(str(error)) from error
    if not is_ours_to_start:
        time.sleep(OWNER_RETRY_S)
        return
    try:
        _start_owner(options)
    finally:
        starter.release()


def _start_owner(options: Options) -> None:
    """Start an owner and wait until it listens, or has failed.

    It is given a session of its own: stock hosts send SIGTERM to the whole process group two
    seconds after they have closed stdin.
    """
    assert options.journal is not None
    log_file = log_path(options.journal)
    try:
        log_fd = open_own(log_file, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        raise CannotServe(f"The owner's log cannot be written: {error}.") from error
    began_at = os.fstat(log_fd).st_size
    read_fd, write_fd = os.pipe()
    with open(log_fd, "ab") as log_stream, open(read_fd) as answer:
        try:
            subprocess.Popen(  # nosec B603 # our own program
                [sys.executable, "-m", "streams.process.owner", options.for_owner()],
                stdin=subprocess.DEVNULL,
                stdout=log_stream,
                stderr=log_stream,
                start_new_session=True,
                pass_fds=(write_fd,),
                env={**os.environ, STARTER_VARIABLE: str(write_fd)},
            )
        finally:
            os.close(write_fd)
        told = answer.read()
        if told == READY:
            return
        why = told or _last_line(log_stream.fileno(), began_at)
    if "already owned" not in why:  # else somebody was faster, and is found soon
        raise CannotServe(f"The journal's owner did not start: {why} See {log_file}.")


def _last_line(log_fd: int, began_at: int) -> str:
    written = os.pread(log_fd, os.fstat(log_fd).st_size - began_at, began_at)
    return written.decode(errors="replace").strip().rpartition("\n")[2] or "it did not say why."
