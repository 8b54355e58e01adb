"""Opens the journal that a server keeps its streams in, with its keys.

It is named by the path of a SQLite file, by the URL of a store that replicas share, or not at all.
The keys are in a file beside a file, and in the store; `key_file` is another file, for either.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import trio

from streams.engine.leases import BEATS
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

    def __init__(
        self, keyring: Keyring, place: str, read: Callable[[], Awaitable[Keyring]] | None
    ) -> None:
        """`place` is where they come from, and `read` reads them there."""
        self.keyring = keyring
        self._place = place
        self._read = read
        self._store: Any = None  # whose other replicas should have the same keys and lease

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
        if self._store is not None:
            try:
                await self._tell()
            except Unavailable as error:
                log.info("the settings of other replicas are unknown", why=str(error))
        return True

    async def join(self, store: Any) -> None:
        """Join the replicas of a store, which then know the settings of this one.

        Raises `JournalUnusable` where one that lives has other keys, since no client could be told
        why its tokens fail, or another lease. One that renews it within two leases lives.
        """
        self._store = store
        if others := self._unfit(await at_start(store.told)):
            renewals = await at_start(store.renew) or {}
            for _ in range(2 * BEATS):
                await trio.sleep(store.lease_s / BEATS)
                later = await at_start(store.renew) or {}
                for replica, why in others.items():
                    if later.get(replica, 0) > renewals.get(replica, 0):
                        raise JournalUnusable(f"Replica {replica} of this journal has {why}")
        await at_start(self._tell)

    def _unfit(self, others: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
        """The replicas that cannot serve a journal together with this one, and why."""
        found = {
            replica: f"a lease of {theirs} s, and this one of {self._lease_s} s, so the one would "
            "take over calls of the other while it lives: give all the same --lease. To change it, "
            "stop all replicas first."
            for replica, theirs in self._other_leases(others).items()
        }
        return found | {
            replica: f"other keys ({theirs}) than {self._place} ({self.keyring.fingerprints[0]}), "
            "so tokens of the one would fail at the other: give all replicas the same keys, and "
            "change them step by step."
            for replica, theirs in self._other_keys(others).items()
        }

    async def _tell(self) -> None:
        """Tell other replicas the settings of this one. Warn where theirs are others."""
        keys = " ".join(self.keyring.fingerprints)
        await self._store.tell({"lease_s": self._lease_s, "keys": keys})
        others = await self._store.told()
        for replica, theirs in self._other_keys(others).items():
            told = {"ours": self.keyring.fingerprints[0], "ours_from": self._place}
            log.warning(
                "another replica has other keys: tokens fail",
                replica=replica,
                theirs=theirs,
                **told,
            )
        for replica, theirs in self._other_leases(others).items():
            told = {"ours": self._lease_s, "theirs": theirs}
            log.warning("another replica has another lease", replica=replica, **told)

    @property
    def _lease_s(self) -> str:
        return f"{self._store.lease_s:g}"

    def _other_leases(self, others: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
        """The replicas with another lease, and theirs in seconds."""
        ours = self._lease_s
        told = {replica: settings.get("lease_s", ours) for replica, settings in others.items()}
        return {replica: theirs for replica, theirs in told.items() if theirs != ours}

    def _other_keys(self, others: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
        """The replicas whose tokens fail here, or at which ours fail, and their first keys."""
        ours, found = self.keyring.fingerprints, {}
        for replica, settings in others.items():
            theirs = settings.get("keys", "").split()
            # While keys are changed, one has more of them, and accepts the tokens of the other.
            if theirs and (theirs[0] not in ours or ours[0] not in theirs):
                found[replica] = theirs[0]
        return found


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
            tell = log.warning if store.is_volatile else log.info
            tell("the journal is in a store", promise=store.describe(), replica=store.replica)
            await keys.join(store)
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
        return Keys(Keyring.load(None), "memory", None)
    in_thread = partial(trio.to_thread.run_sync, read)
    return Keys(await in_thread(), str(given or beside), in_thread)


async def _keys_of_store(store: Any, place: Place) -> Keys:
    """The keys that the store has. The first replica makes them."""
    if place.key_file is not None:
        return await _keys_of_file(place.key_file, None)

    where = f"{store.keys_name} in {without_secrets(str(place.journal))}"

    async def read() -> Keyring:
        content = await store.keys()
        if content is None:
            raise JournalUnusable(f"{where} is missing: this replica will put it back.")
        mend = "or delete it: a replica that runs puts its keys back, else there will be new ones"
        keyring = Keyring.parse(content, where, mend)
        store.know_keys(content)
        return keyring

    await store.await_keys()
    if await store.keys() is None:
        if store.sizes["streams"]:
            log.warning(
                "the journal has calls but no keys: their tickets are void",
                mend="serve it with the --key-file of before",
            )
        await store.save_keys(new_keys())  # unless another replica was faster
    return Keys(await read(), "the store", read)
