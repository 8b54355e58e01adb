"""From one owner of a journal in a file to the next one, without a client that is refused.

1. The next process starts with `--standby` and loads everything. It binds its addresses and
   does not listen there, so balancers send nothing to it.
2. The owner is told to end (SIGTERM). It tells the next process, which listens then: the kernel
   accepts connections for it, and keeps them.
3. The owner closes its listeners, and drains: see `streams.engine.engine.Engine.drain`.
4. The next process owns the journal, continues its calls, and serves what has come meanwhile.

The steps of an owner that ends, by their cause:

| cause                                      | grace       | steps                                |
|--------------------------------------------|-------------|--------------------------------------|
| SIGTERM                                    | `--grace`   | hand over, drain, end                |
| SIGTERM, SIGINT, SIGHUP of a terminal that | 0           | hand over, end; without a process    |
| is gone                                    |             | that waits (`is_awaited`) only end   |
| `mcp-streams drain`                        | `--grace`   | hand over, drain, end                |
|                                            | 0           | hand over, end                       |
| a second signal                            | 0 from now  | the rest, without the wait for calls |
| the backend fails                          |             | end                                  |
| SIGKILL                                    |             | none: the next process listens later |

`streams.process.shutdown` takes these steps:

- hand over: `handing_over`, then `Departure.begin`. It takes `HEIR_S` at most, and no grace
  shortens it. It takes so long if the next process has the same address, which is free only once
  the owner has closed its listeners.
- drain: the rest of `Engine.drain`, which waits for calls.
- end: `Engine.shut_down`. `streams.process.deadline` limits all steps together.
"""

import errno
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import trio

from streams.errors import JournalUnusable
from streams.journal.ownership import Heir, Leave, check_files, has_heir, owner_of
from streams.logs import log
from streams.process.addresses import joined, why_not
from streams.process.options import CannotServe

LOOK_EVERY_S: Final = 0.02
HEIR_S: Final = 1.0  # an owner waits so long for its heir to listen

Addresses = Mapping[str, tuple[str, int]]
"""Hosts and ports, for "http" and for "ws"."""


class Standby:
    """The place of a process that waits for a journal. Made by `standing_by`."""

    def __init__(self, heir: Heir | None, sockets: Mapping[str, Sequence[socket.socket]]) -> None:
        self._heir = heir
        self.sockets = sockets

    def over(self) -> None:
        """The process owns the journal: another one may wait for it now."""
        if self._heir is not None:
            self._heir.release()


@asynccontextmanager
async def standing_by(
    journal: Path | None, standby_s: float, addresses: Addresses
) -> AsyncIterator[Standby]:
    """Wait up to `standby_s` seconds until no other process owns the journal.

    The addresses are listened at, if the process had to wait. Raises `CannotServe`: a process that
    cannot listen must not take over the calls of a journal.
    """
    owner = None
    if journal is not None:
        check_files(journal)
        owner = owner_of(journal)
    if owner is None:
        await _check(addresses)
    if journal is None or not standby_s:
        yield Standby(None, {})
        return
    heir = Heir(journal)
    try:
        heir.acquire()
        sockets: Mapping[str, Sequence[socket.socket]] = {}
        if owner is not None:
            log.info("waiting for the owner of the journal", pid=owner, for_s=standby_s)
            with trio.move_on_after(standby_s) as patience:
                sockets = await _inherit(heir, addresses)
            if patience.cancelled_caught:
                raise CannotServe(
                    f"{journal} is still owned by another process (pid {owner}) after "
                    f"{standby_s:g} s: stop that one, or wait longer with --standby."
                )
        yield Standby(heir, sockets)
    finally:
        heir.release()


async def _inherit(heir: Heir, addresses: Addresses) -> Mapping[str, Sequence[socket.socket]]:
    """Wait until the journal is free; returns sockets that listen."""
    waiting = dict(addresses)
    bound: dict[str, Sequence[socket.socket]] = {}
    is_listening = False
    while True:
        for name, address in list(waiting.items()):
            try:
                bound[name] = await _bind(*address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise CannotServe(why_not(joined(*address), error)) from error
            else:
                del waiting[name]
        if not (is_listening or waiting) and heir.may_listen:
            for each in (each for sockets in bound.values() for each in sockets):
                each.listen(socket.SOMAXCONN)
            heir.listens()
            is_listening = True
        if not heir.is_owned and not waiting:
            return bound
        await trio.sleep(LOOK_EVERY_S)


async def _check(addresses: Addresses) -> None:
    """Raise `CannotServe` if this process cannot listen at one of the addresses now."""
    for address in addresses.values():
        try:
            for one in await _bind(*address):
                one.close()
        except OSError as error:
            raise CannotServe(why_not(joined(*address), error)) from error


async def _bind(host: str, port: int) -> Sequence[socket.socket]:
    """Sockets at each address of a host. Raises `OSError`."""
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in await trio.socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            one = socket.socket(family, kind, protocol)
            sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
    except OSError:
        for one in sockets:
            one.close()
        raise
    return sockets


def is_awaited(journal: Path | None) -> bool:
    """Whether another process waits for the journal, which this one owns."""
    return journal is not None and has_heir(journal)


async def handing_over(journal: Path | None) -> None:
    """Wait until the process that waits for the journal listens, if there is one."""
    if journal is None:
        return
    try:
        leave = Leave(journal)
    except OSError as error:
        raise JournalUnusable(f"{journal}: its lock file cannot be used: {error}") from error
    if leave.has_heir:
        with trio.move_on_after(HEIR_S):
            while not leave.is_followed:
                await trio.sleep(LOOK_EVERY_S)
        log.info("handing over to the next process", is_listening=leave.is_followed)
