"""The journal in Redis or Valkey, which several replicas share: the only package that knows them.

`open_redis_journal` opens it. `library.lua` has what the store does in one step; `writer` and
`batch` do all writing, `journal` reads and has the rest of the contract, `news` hears of others,
`damage` is about keys that cannot be read.

All keys of a journal begin with `{prefix}:`, so they lie in one slot of a cluster:

| key | type | |
|---|---|---|
| `journal` | hash | schema, epoch, counts of bytes |
| `r:<stream>` | hash | a record: see `codec` |
| `l:<stream>` | stream | its lines; a stored run has the id `<last seq>-<count>` |
| `g:<stream>` | hash | its grants |
| `f:<stream>` | set | the replicas that follow it |
| `m:<name>` | string | the stream of a name |
| `n` | index | all streams |
| `o:<replica>` | index | the streams of an owner; `o:` are those that wait for one |
| `w:<principal>`, `v:…` | index | a principal's wanted streams, those that were read |
| `e`, `u` | sorted set | evicted streams by when they are due, and the unwanted ones |
| `s:<session>`, `sg:<session>` | hash | a session, and its grants |
| `sessions`, `sp:<principal>` | sorted set | sessions by when they expire |
| `webhooks` | hash | webhooks that wait, by their ids |
| `webhooks_due` | sorted set | their ids by when they are due |
| `replicas`, `commits` | hash | of each replica that lives: renewals, its last commit |
| `settings` | hash | of each replica: what should be the same at all |
| `epochs`, `schemas` | hash | of each replica: its epoch, the newest schema that it knows |
| `gone` | sorted set | replicas whose streams were claimed, by when they are forgotten |
| `unclaimed` | set | of those, the ones that still have streams |
| `in:<replica>` | stream | posts to a replica; `in:` are for streams that wait for an owner |
| `keys`, `copying` | string | keys of tokens; the marker of an unfinished copy |
| `t:<name>` | string | the holder of a turn |
| `c:<replica>` | channel | news for a replica; `c:` are for all |

An index is a sorted set whose scores are all 0: its members sort by their bytes.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from streams.errors import JournalUnusable
from streams.journal.redis.addresses import parse
from streams.limits import CACHE_BYTES_MAX, DAY_S, Durability

if TYPE_CHECKING:
    from streams.journal.redis.journal import RedisJournal

__all__ = ["open_redis_journal"]

_EXTRA = ("coredis", "anyio")  # what the extra `redis` installs, as far as it is imported here


@asynccontextmanager
async def open_redis_journal(
    url: str,
    *,
    lease_s: float = 2.0,
    durability: Durability = "power",
    replicas_acked: int | None = None,
    prefix: str | None = None,
    bytes_max: int | None = None,
    anonymous_bytes_max: int | None = None,
    cache_bytes_max: int = CACHE_BYTES_MAX,
    session_idle_s: float = DAY_S,
    call_s: float = 5.0,
    copies: bool = False,
    only_existing: bool = False,
) -> AsyncIterator["RedisJournal"]:
    """Open the journal in the store at `url`, as one replica of it, until the end of the block.

    `streams.journal.redis.addresses` has the forms of URLs. With `replicas_acked` a commit waits
    until so many replicas of the store have it: on disk (WAITAOF) with the durability "power", else
    in memory (WAIT). `bytes_max` limits what all streams take, `anonymous_bytes_max` those of
    anonymous callers. Of the messages that this replica has written last, `cache_bytes_max` bytes
    stay in memory. A session that is not saved for `session_idle_s` seconds and an hour is deleted.
    No call takes longer than about `call_s` seconds. `copies` opens an unfinished copy as well
    (`begin_copy`); `only_existing` makes no new journal.

    Raises `JournalUnusable`, which says what to do, if the store is not safe for a journal, or if
    the extra is missing; `Unavailable` if it cannot be reached now.
    """
    address = parse(url, prefix)
    try:
        from streams.journal.redis.journal import RedisJournal  # noqa: PLC0415
        from streams.journal.redis.link import Servers  # noqa: PLC0415
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        raise JournalUnusable(
            f"{address} needs {missing}, which is not installed: "
            "run pip install 'mcp-streams[redis]'."
        ) from error
    async with _alone(), trio.open_nursery() as nursery:
        servers = Servers(address, nursery, call_s)
        journal = RedisJournal(
            servers,
            lease_s=lease_s,
            durability=durability,
            replicas_acked=replicas_acked or 0,
            bytes_max=bytes_max,
            anonymous_bytes_max=anonymous_bytes_max,
            cache_bytes_max=cache_bytes_max,
            session_idle_s=session_idle_s + 3600.0,
        )
        try:
            await journal.open(copies=copies, only_existing=only_existing)
            await journal.listen(nursery)
            servers.is_open = True
            yield journal
        finally:
            await journal.aclose()
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def _alone() -> AsyncIterator[None]:
    """Raise an error of the block as it is, without the group that a nursery puts around it."""
    try:
        yield
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from None
