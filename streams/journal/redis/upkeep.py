"""What the command asks of a journal as a whole: all of its streams, its keys, and copies of it.

The hash `journal` has two fields for this: `keys`, the keys of the tokens if replicas have them
from here, and `copying` while an unfinished copy is in the journal. No replica serves that.
"""

from collections.abc import Sequence
from typing import Any, Final

from streams.errors import JournalUnusable
from streams.journal.records import Record
from streams.journal.redis import codec

DELETED_AT_ONCE: Final = 1000  # keys of one step

# The keys that a deletion leaves: a replica that has opened the journal needs them.
_KEPT: Final = ("journal", "replicas", "commits", "epochs", "gone")
_NAME_BYTES: Final = 16


class Upkeep:
    """The part of `RedisJournal` for the command."""

    _prefix: str

    async def _calls(self, *commands: Sequence[Any]) -> list[Any]:
        raise NotImplementedError

    async def _records(self, streams: Sequence[str]) -> list[Record | None]:
        raise NotImplementedError

    async def streams(self, after: int, limit: int) -> Sequence[tuple[Record, Sequence[bytes]]]:
        """See `streams.journal.copying.Whole.streams`."""
        low = b"(" + codec.number_bytes(after) + b"\xff"
        found: list[tuple[Record, Sequence[bytes]]] = []
        while not found:
            [members] = await self._calls(
                (b"ZRANGE", self._prefix + "n", low, b"+", b"BYLEX", b"LIMIT", 0, limit)
            )
            if not members:
                break
            records = await self._records(list(map(codec.stream_in, members)))
            there = [record for record in records if record is not None]
            found = list(zip(there, await self._names_of(there), strict=True))
            low = b"(" + members[-1]
        return found

    async def _names_of(self, records: Sequence[Record]) -> Sequence[Sequence[bytes]]:
        """The names that lead to these streams. A name may lead to a later stream by now."""
        if not records:
            return []
        stored = await self._calls(
            *((b"HGET", f"{self._prefix}r:{record.stream}", b"n") for record in records)
        )
        given = [
            [names[at : at + _NAME_BYTES] for at in range(0, len(names), _NAME_BYTES)]
            for names in (each or b"" for each in stored)
        ]
        every = [name for names in given for name in names]
        if not every:
            return given
        led = await self._calls(*((b"GET", self._prefix.encode() + b"m:" + name) for name in every))
        leads = dict(zip(every, led, strict=True))
        return [
            [name for name in names if leads[name] == record.stream.encode()]
            for record, names in zip(records, given, strict=True)
        ]

    # Keys of tokens

    async def keys(self) -> bytes | None:
        """The content of a file of keys (`streams.keys`), as replicas share it; None if none is."""
        [content] = await self._calls((b"HGET", self._prefix + "journal", b"keys"))
        return None if content is None else bytes(content)

    async def save_keys(self, content: bytes) -> None:
        """Share these keys, unless the journal has some already."""
        await self._calls((b"HSETNX", self._prefix + "journal", b"keys", content))

    # Copies

    async def refuse_unfinished(self) -> None:
        """Raise `JournalUnusable` if a copy into this journal was begun, and not finished."""
        if await self._is_unfinished():
            raise JournalUnusable(
                f"The journal {self._prefix[1:-2]} in this store is an incomplete copy: complete "
                f"it with mcp-streams copy, or delete the keys that begin with {self._prefix}."
            )

    async def _is_unfinished(self) -> bool:
        [begun] = await self._calls((b"HEXISTS", self._prefix + "journal", b"copying"))
        return bool(begun)

    async def begin_copy(self) -> None:
        """Mark the journal as an unfinished copy. What such a copy has left is deleted.

        Raises `JournalUnusable` if the journal has streams, sessions or keys otherwise.
        """
        if await self._is_unfinished():
            await self._delete_all()
            return
        prefix = self._prefix
        counts = await self._calls(
            (b"ZCARD", prefix + "n"),
            (b"ZCARD", prefix + "sessions"),
            (b"HEXISTS", prefix + "journal", b"keys"),
        )
        if any(counts):
            raise JournalUnusable(
                "The store has a journal there already: name another with ?prefix=NAME, or delete "
                f"the keys that begin with {prefix}."
            )
        await self._calls((b"HSET", prefix + "journal", b"copying", 1))

    async def finish_copy(self) -> None:
        """The copy is whole: replicas may serve it."""
        await self._calls((b"HDEL", self._prefix + "journal", b"copying"))

    async def _delete_all(self) -> None:
        pattern = "".join(f"\\{each}" if each in "*?[]\\" else each for each in self._prefix) + "*"
        kept = {(self._prefix + each).encode() for each in _KEPT}
        cursor: Any = 0
        while True:
            [(cursor, found)] = await self._calls(
                (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", DELETED_AT_ONCE)
            )
            if keys := [key for key in found if key not in kept]:
                await self._calls((b"UNLINK", *keys))
            if int(cursor) == 0:
                break
        fields = (b"bytes", b"anonymous", b"order", b"keys")
        await self._calls((b"HDEL", self._prefix + "journal", *fields))
