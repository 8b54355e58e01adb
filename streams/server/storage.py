"""Opens the journal that a server keeps its streams in, with its keys.

It is named by the path of a SQLite file, by the URL of a store that replicas share, or not at all.
The keys are in a file beside a file, and in the store; `key_file` is another file, for either.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import trio

from streams.engine.retry import at_start
from streams.errors import JournalUnusable, Unavailable
from streams.journal.addresses import checked, is_url, without_secrets
from streams.journal.contract import Journal
from streams.journal.memory import MemoryJournal
from streams.journal.ownership import key_path
from streams.journal.sqlite import open_sqlite_journal
from streams.keys import Keyring, new_keys
from streams.limits import LEASE_S, Durability, Limits
from streams.logs import log


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where streams are kept, and how. `lease_s` and `replicas_acked` are those of a store."""

    journal: str | Path | None = None
    durability: Durability = "power"
    lease_s: float = LEASE_S
    replicas_acked: int = 0
    key_file: Path | None = None
    is_compact: bool = False  # of a file


class Keys:
    """The keyring of a process, and the function that reads its keys again."""

    def __init__(self, keyring: Keyring, read: Callable[[], Awaitable[Keyring]] | None) -> None:
        self.keyring = keyring
        self.store: Any = None  # whose other replicas should have the same keys and lease
        self._read = read

    async def reload(self) -> bool:
        """Read the keys again, and return whether that was possible.

        If they cannot be used, the log says so, and the former ones stay.
        """
        if self._read is None:
            return False
        try:
            found = await self._read()
        except (JournalUnusable, Unavailable) as error:
            log.error("the keys in use stay", why=str(error))
            return False
        self.keyring.change_to(found)
        log.info(
            "the keys were read again", keys=len(found.fingerprints), first=found.fingerprints[0]
        )
        await self.compare()
        return True

    async def compare(self) -> None:
        """Warn if another replica that lives has other keys, or another lease."""
        if self.store is None:
            return
        marks = self.keyring.fingerprints
        ours = {"lease_s": f"{self.store.lease_s:g}", "keys": " ".join(marks)}
        try:
            others = await self.store.compare(ours)
        except Unavailable as error:
            log.info("the settings of other replicas are unknown", why=str(error))
            return
        for replica, theirs in others.items():
            other = theirs.get("keys", "").split()
            # While keys are changed, one has more of them, and accepts the tokens of the other.
            if other and (other[0] not in marks or marks[0] not in other):
                told = {"ours": marks[0], "theirs": other[0]}
                log.warning("another replica has other keys: tokens fail", replica=replica, **told)
            if (lease_s := theirs.get("lease_s", ours["lease_s"])) != ours["lease_s"]:
                told = {"ours": ours["lease_s"], "theirs": lease_s}
                log.warning("another replica has another lease", replica=replica, **told)


def import_client(journal: str) -> None:
    """Import the client of a store, which takes a while: before the watchdog looks."""
    if is_url(journal):
        with suppress(ImportError):  # opening the journal says what is missing
            import_module("streams.journal.redis.journal")


@asynccontextmanager
async def open_storage(place: Place, limits: Limits) -> AsyncIterator[tuple[Journal, Keys]]:
    """Open the journal for the length of a block. Raises `JournalUnusable`."""
    name = place.journal
    if name is None:
        log.info("no --journal: streams live as long as this process")
        yield MemoryJournal(), await _keys_of_file(place.key_file, None)
    elif isinstance(name, str) and is_url(name):
        async with AsyncExitStack() as stack:
            store = await at_start(lambda: stack.enter_async_context(open_store(place, limits)))
            keys = await at_start(partial(_keys_of_store, store, place))
            keys.store = store
            tell = log.warning if store.is_volatile else log.info
            tell("the journal is in a store", promise=store.describe(), replica=store.replica)
            await keys.compare()
            yield store, keys
    else:
        path = Path(name)
        async with open_sqlite_journal(
            path,
            durability=place.durability,
            bytes_max=limits.journal_bytes_max or None,
            anonymous_bytes_max=limits.anonymous_bytes_max or None,
            cache_bytes_max=limits.journal_cache_bytes_max,
            is_compact=place.is_compact,
        ) as journal:
            yield journal, await _keys_of_file(place.key_file, key_path(path))


@asynccontextmanager
async def open_store(place: Place, limits: Limits, **how: Any) -> AsyncIterator[Any]:
    """Open the `streams.journal.redis.RedisJournal` at a URL. Raises `JournalUnusable`."""
    try:
        url = checked(str(place.journal))
    except ValueError as error:
        raise JournalUnusable(str(error)) from None
    # Imported where it is used (PLC0415): a server with a file does without it.
    from streams.journal.redis import open_redis_journal  # noqa: PLC0415

    async with open_redis_journal(
        url,
        lease_s=place.lease_s,
        durability=place.durability,
        replicas_acked=place.replicas_acked,
        bytes_max=limits.journal_bytes_max or None,
        anonymous_bytes_max=limits.anonymous_bytes_max or None,
        cache_bytes_max=limits.journal_cache_bytes_max,
        session_idle_s=limits.session_idle_s,
        **how,
    ) as journal:
        yield journal


async def _keys_of_file(given: Path | None, beside: Path | None) -> Keys:
    if given is not None:
        read = partial(Keyring.existing, given)
    elif beside is not None:
        Keyring.load(beside)  # makes the file
        read = partial(Keyring.existing, beside, follows_links=False)
    else:
        await trio.lowlevel.checkpoint()
        return Keys(Keyring.load(None), None)
    return Keys(await trio.to_thread.run_sync(read), partial(trio.to_thread.run_sync, read))


async def _keys_of_store(store: Any, place: Place) -> Keys:
    """The keys that the store has. The first replica makes them."""
    if place.key_file is not None:
        return await _keys_of_file(place.key_file, None)
    where = without_secrets(str(place.journal))

    async def read() -> Keyring:
        content = await store.keys()
        if content is None:
            raise JournalUnusable(f"{where} has no keys any more: restore them, or restart.")
        return Keyring.parse(content, f"{where}, under its keys,")

    await store.await_keys()
    if await store.keys() is None:
        await store.save_keys(new_keys(), replaces=None)  # unless another replica was faster
    return Keys(await read(), read)
