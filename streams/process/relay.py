"""The relay: the process that a client spawns with `--stdio --journal FILE` (or a store's URL).

It finds the journal's owner, or starts it in a session of its own, and hands its standard streams
over to it. So calls outlive the client's host, and the next process that a client spawns reaches
them. A client waits for this process to start, so it imports nothing that takes time to load.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from streams.errors import JournalUnusable
from streams.journal.ownership import StarterLock, check_files, log_path, socket_path
from streams.permissions import open_own
from streams.process.differences import settings, warning
from streams.process.options import READY, STARTER_VARIABLE, CannotServe, Options
from transports.relay.handover import AnotherUser, NoOwner, OwnerLost, RelayRefused, relay
from transports.relay.standard import claim_standard_streams

# How long a relay looks for an owner, or waits for one that another relay is starting.
OWNER_WAIT_S: Final = 30.0
OWNER_RETRY_S: Final = 0.05


def run(options: Options) -> None:
    """Connect the client to the journal's owner until they end. Raises `CannotServe`."""
    assert options.owned is not None
    owned = options.owned
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, _go_on)
    _check_files(owned)
    fds = claim_standard_streams()
    starter = StarterLock(owned)
    give_up_at = time.monotonic() + OWNER_WAIT_S
    while True:
        try:
            warn = partial(_warn, options)
            relay(socket_path(owned), options.hello(), fds, on_accepted=warn)
        except RelayRefused as refused:
            raise CannotServe(str(refused)) from refused
        except OwnerLost as lost:
            log_file = log_path(owned)
            raise CannotServe(f"T{str(lost)[1:]}: see {log_file}, and start this again.") from lost
        except AnotherUser as stranger:
            raise CannotServe(f"{stranger}.") from stranger
        except NoOwner as missing:
            if time.monotonic() > give_up_at:
                raise CannotServe(f"{missing}: see {log_path(owned)}.") from missing
        else:
            return
        _ensure_owner(options, starter)


def _go_on(*_: object) -> None:
    """Handle SIGHUP by doing nothing: the owner reloads, and a relay ends with its client.

    It is a handler, because children inherit an ignored signal.
    """


def _warn(options: Options, answer: Mapping[str, object]) -> None:
    """Tell the user, on standard error, that the owner has other options than this relay."""
    theirs, owner = answer.get("settings"), answer.get("pid")
    if isinstance(theirs, dict) and isinstance(owner, int):
        told = warning(settings(options), theirs, owner)
        if told is not None:
            with suppress(OSError):  # it may be closed
                print(f"mcp-streams: {told}", file=sys.stderr, flush=True)


def _check_files(journal: Path) -> None:
    try:
        check_files(journal)
    except JournalUnusable as error:
        raise CannotServe(str(error)) from error


def _ensure_owner(options: Options, starter: StarterLock) -> None:
    """Start an owner, or wait a little for one that another relay is starting."""
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

    It gets a session of its own, because common hosts send SIGTERM to the whole process group two
    seconds after they have closed stdin.
    """
    assert options.owned is not None
    log_file = log_path(options.owned)
    try:
        log_fd = open_own(log_file, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        raise CannotServe(f"The owner's log cannot be written: {error}.") from error
    began_at = os.fstat(log_fd).st_size
    read_fd, write_fd = os.pipe()
    with open(log_fd, "ab") as log_stream, open(read_fd) as answer:
        try:
            owner = subprocess.Popen(  # nosec B603 # our own program
                [sys.executable, "-m", "streams.process.owner", options.owned],
                stdin=subprocess.PIPE,
                stdout=log_stream,
                stderr=log_stream,
                start_new_session=True,
                pass_fds=(write_fd,),
                env={**os.environ, STARTER_VARIABLE: str(write_fd)},
            )
        finally:
            os.close(write_fd)
        assert owner.stdin is not None
        with suppress(BrokenPipeError), owner.stdin as told_to_owner:  # it may have ended at once
            told_to_owner.write(options.for_owner().encode())
        told = answer.read()
        if told == READY:
            return
        why = told or _last_line(log_stream.fileno(), began_at)
    if "already owned" not in why:  # else another process was faster, and will be found
        raise CannotServe(f"The journal's owner did not start: {why} See {log_file}.")


def _last_line(log_fd: int, began_at: int) -> str:
    written = os.pread(log_fd, os.fstat(log_fd).st_size - began_at, began_at)
    return written.decode(errors="replace").strip().rpartition("\n")[2] or "it did not say why."
