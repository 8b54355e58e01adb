"""The action of `copy`: all of a journal into another, with the keys if they are wanted.

A file is written under another name, and gets its own once it is complete. A store that has an
unfinished copy is marked as such, and refused by every process that serves.
"""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from streams import messages
from streams.cli.actions.journal import counted, shown_progress
from streams.cli.actions.output import as_json_text, say
from streams.cli.base import DETACHED, DONE, complain
from streams.cli.interrupts import unless_interrupted
from streams.errors import JournalError, JournalUnusable, Refusal, UnsafeFile, first_of
from streams.files import whole, write_whole
from streams.journal.addresses import is_url, without_secrets
from streams.journal.copying import Copied, Progress, Whole, copy_journal
from streams.journal.ownership import key_path, lock_path
from streams.journal.records import Record
from streams.journal.sqlite import open_sqlite_journal
from streams.journal.sqlite.file import check_new
from streams.journal.sqlite.reader import is_current, opened_to_read
from streams.keys import FILE_BYTES_MAX, Keyring
from streams.limits import Limits
from streams.permissions import read_secret
from streams.protocol import extension
from streams.server.storage import Place, open_store

# A replica that lives renews its lease several times in this time, and a slow one at least once.
WATCH_LEASES: Final = 1.5
WATCH_LOOKS: Final = 6  # our own lease is renewed with each

INCOMPLETE: Final = "The copy is incomplete, and no process serves it: copy again to complete it."


def run(source: str, target: str, *, with_keys: bool, lease_s: float, as_json: bool) -> int:
    """Copy `source` to `target`, each a path or a URL; return the exit code."""
    shown = [without_secrets(name) if is_url(name) else name for name in (source, target)]
    failure: BaseException | None = None
    copied: Copied | None = None
    try:
        with shown_progress() as on_progress:
            copying = partial(_copy, source, target, with_keys, lease_s, on_progress)
            copied = trio.run(unless_interrupted, copying)
    except* (JournalError, UnsafeFile, OSError, ValueError) as errors:
        failure = first_of(errors)
    if failure is not None:
        return complain(f"{str(failure).removesuffix('.')}.")
    if copied is None:
        became = INCOMPLETE if is_url(target) else f"{target} was not made."
        return complain(f"Interrupted. {became}", DETACHED)
    _tell(copied, *shown, with_keys=with_keys, as_json=as_json)
    return DONE


def _tell(copied: Copied, source: str, target: str, *, with_keys: bool, as_json: bool) -> None:
    if as_json:
        told = {"source": source, "target": target, "keys": with_keys}
        print(as_json_text(told | msgspec.to_builtins(copied)))
        return
    what = (
        f"{counted(copied.streams, 'stream')}, {counted(copied.messages, 'message')}, "
        f"{counted(copied.sessions, 'session')}"
    )
    print(f"{target} has all of {source}, and both were compared: {what}.")
    if not with_keys:
        say(
            "The keys were not copied (--keys): tickets of the old journal work with the new one "
            "only if both are served with the same --key-file."
        )


async def _copy(
    source: str, target: str, with_keys: bool, lease_s: float, on_progress: Progress
) -> Copied:
    async with _opened_source(source, lease_s) as (journal, keys):
        shown = without_secrets(source) if is_url(source) else source
        if with_keys and keys is None:
            raise JournalUnusable(f"{shown} has no keys to copy: leave out --keys.")
        names_of = partial(_names_of, None if keys is None else Keyring.parse(keys, shown))
        to_copy = keys if with_keys else None
        if is_url(target):
            return await _copy_to_store(journal, target, lease_s, to_copy, names_of, on_progress)
        return await _copy_to_file(journal, Path(target), to_copy, names_of, on_progress)


# Sources


@asynccontextmanager
async def _opened_source(source: str, lease_s: float) -> AsyncIterator[tuple[Whole, bytes | None]]:
    """The journal, which no other process uses, and its keys."""
    if is_url(source):
        async with open_store(Place(journal=source, lease_s=lease_s), Limits()) as store:
            await _check_alone(store, source, lease_s)
            yield store, await store.keys()
        return
    path = Path(source)
    with opened_to_read(path) as (_, schema):  # else a missing file would be made
        if not is_current(schema):
            raise JournalUnusable(
                f"{path} was written by an older release (schema {schema}): serve it once, which "
                "updates it."
            )
    try:
        keys = read_secret(key_path(path), FILE_BYTES_MAX, follows_links=False)
    except FileNotFoundError:
        keys = None
    async with open_sqlite_journal(path) as journal:
        yield journal, keys


async def _check_alone(store: Any, url: str, lease_s: float) -> None:
    """Raise `JournalUnusable` if another replica renews its lease."""
    where = without_secrets(url)
    before = await store.renew()
    for _ in range(WATCH_LOOKS):
        await trio.sleep(WATCH_LEASES * lease_s / WATCH_LOOKS)
        now = await store.renew()
        if before is None or now is None:
            raise JournalUnusable(f"{where} is in use: stop all of its replicas, and copy then.")
        others = [each for each in now if each != store.replica]
        if living := [each for each in others if now[each] > before.get(each, -1)]:
            raise JournalUnusable(
                f"{where} is in use by {counted(len(living), 'replica')}: stop all of them, and "
                "copy then."
            )


def _names_of(keyring: Keyring | None, record: Record) -> Sequence[bytes]:
    """The names of a stream that is not evicted: a file does not have them, and a store does."""
    names = keyring.names(record.stream) if keyring is not None and record.is_announced else []
    try:
        mark = extension.mark_of(messages.parse(record.origin).params)
    except Refusal:
        mark = None  # `verify` complains about such a request
    return names if mark is None else [*names, bytes.fromhex(mark.name)]


# Targets


async def _copy_to_store(
    journal: Whole,
    url: str,
    lease_s: float,
    keys: bytes | None,
    names_of: Any,
    on_progress: Progress,
) -> Copied:
    place = Place(journal=url, lease_s=lease_s)
    async with open_store(place, Limits(), copies=True) as store:
        await _check_alone(store, url, lease_s)
        await store.begin_copy()
        try:
            async with _renewing(store, lease_s):
                copied = await copy_journal(journal, store, on_progress, names_of)
            if keys is not None:
                await store.save_keys(keys)
            await store.release()
            await store.finish_copy()
        except* JournalError as errors:
            failure = str(first_of(errors)).removesuffix(".")
            raise JournalUnusable(f"{failure}. {INCOMPLETE}") from None
        return copied


@asynccontextmanager
async def _renewing(store: Any, lease_s: float) -> AsyncIterator[None]:
    """Keep the lease for the length of a block."""

    async def renew() -> None:
        while True:
            await trio.sleep(lease_s / 4)
            if await store.renew() is None:
                raise JournalUnusable("another process has taken the target over")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(renew)
        yield
        nursery.cancel_scope.cancel()


async def _copy_to_file(
    journal: Whole, to: Path, keys: bytes | None, names_of: Any, on_progress: Progress
) -> Copied:
    _check_new(to, with_keys=keys is not None)
    try:
        with whole(to, os.link) as file:
            try:
                async with open_sqlite_journal(file, durability="process") as target:
                    copied = await copy_journal(journal, target, on_progress, names_of)
            finally:
                with suppress(FileNotFoundError):
                    lock_path(file).unlink()
            if keys is not None:
                write_whole(key_path(to), keys, os.link)
    except FileExistsError as error:
        raise JournalUnusable(f"{error.filename2 or to} exists already: name a new file.") from None
    return copied


def _check_new(to: Path, *, with_keys: bool) -> None:
    check_new(to)
    if with_keys and os.path.lexists(key_path(to)):
        raise JournalUnusable(f"{key_path(to)} exists already: name a new file.")
