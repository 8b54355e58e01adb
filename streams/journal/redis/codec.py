"""How records are stored, and the names of keys and indexes.

A record is a hash of four fields, so that a commit rewrites little of it:

- `k`, its mark: 12 bytes of version, then `fence:epoch:owner`. Each commit writes a new version.
- `p`, what changes: `Progress`.
- `i`, what never changes: `Identity`.
- `o`, the originating request.

Functions that decode raise `ValueError`, `LookupError`, `TypeError` or `msgspec.MsgspecError` for
bytes that this module has not made: see `damage`.
"""

import hashlib
from typing import Any, Final

import msgspec

from streams.journal.contract import Post
from streams.journal.records import Outcome, Record, Restart
from streams.journal.sessions import Grant, SessionRecord
from streams.journal.webhooks import Webhook
from streams.messages import RequestId

# Of records, sessions and keys. A journal of a newer schema is refused. The store has the newest
# schema that all its replicas know: a version with another form writes it when the store has its
# schema. A field that is added at the end of a struct, with a default, needs no new schema.
SCHEMA: Final = 1
VERSION_BYTES: Final = 12
NAME_BYTES: Final = 16
# The bytes of a stream besides its lines and its request, as `bytes_max` counts them.
STREAM_BYTES: Final = 1024
RUN_BYTES: Final = 64  # of a stored run, besides its lines
_SIGN: Final = 1 << 63


class Identity(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The fields of a record that never change, apart from its id and request."""

    principal: str
    min_s: float
    max_s: float
    created_at: float
    is_announced: bool
    number: int


class Progress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The fields of a record that change, and the bytes of the lines that are kept."""

    outcome: str
    last: int
    acked: int
    last_request: int
    last_error: int
    ended_at: float
    pages: tuple[int, ...] | None
    due_at: float | None
    is_read: bool
    restart: Restart | None
    lost: tuple[int, int] | None
    kept_bytes: int = 0


class StoredSession(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A session, without its key."""

    principal: str
    revision: str
    capabilities: bytes
    level: str
    seen_at: float


class StoredGrant(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A grant. JSON keeps the type of an id, and holds numbers of any size."""

    session: str
    delivery: str
    stream: str
    reply_id: bytes
    takes_over: bool
    start: int


class StoredWebhook(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A webhook, without its id and the time at which it is due."""

    stream: str
    url: str
    body: bytes
    attempts: int


class Mark(msgspec.Struct, frozen=True, gc=False):
    """The field `k` of a record, decoded."""

    fence: int
    epoch: int
    owner: str


_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}
_encode: Final = msgspec.msgpack.Encoder().encode
_progress: Final = msgspec.msgpack.Decoder(Progress).decode
_identity: Final = msgspec.msgpack.Decoder(Identity).decode
_session: Final = msgspec.msgpack.Decoder(StoredSession).decode
_grant: Final = msgspec.msgpack.Decoder(StoredGrant).decode
_webhook: Final = msgspec.msgpack.Decoder(StoredWebhook).decode


def mark(version: bytes, fence: int, epoch: int, owner: str) -> bytes:
    """The field `k` of a record."""
    return version + f"{fence}:{epoch}:{owner}".encode()


def parse_mark(stored: bytes) -> Mark:
    """Decode the field `k`."""
    fence, epoch, owner = stored[VERSION_BYTES:].decode().split(":", 2)
    return Mark(int(fence), int(epoch), owner)


def progress_of(record: Record, kept_bytes: int) -> bytes:
    """The field `p` of a record."""
    return _encode(
        Progress(
            record.outcome.value,
            record.last,
            record.acked,
            record.last_request,
            record.last_error,
            record.ended_at,
            record.pages,
            record.due_at,
            record.is_read,
            record.restart,
            record.lost,
            kept_bytes,
        )
    )


def identity_of(record: Record) -> bytes:
    """The field `i` of a record."""
    return _encode(
        Identity(
            record.principal,
            record.min_s,
            record.max_s,
            record.created_at,
            record.is_announced,
            record.number,
        )
    )


def record_of(stream: str, k: bytes, p: bytes, i: bytes, o: bytes) -> tuple[Record, int]:
    """A record and the bytes of its lines, from the fields of its hash."""
    its, was, marked = _progress(p), _identity(i), parse_mark(k)
    record = Record(
        stream=stream,
        principal=was.principal,
        origin=o,
        min_s=was.min_s,
        max_s=was.max_s,
        created_at=was.created_at,
        fence=marked.fence,
        is_announced=was.is_announced,
        outcome=_OUTCOMES[its.outcome],
        last=its.last,
        acked=its.acked,
        last_request=its.last_request,
        last_error=its.last_error,
        ended_at=its.ended_at,
        pages=its.pages,
        number=was.number,
        due_at=its.due_at,
        is_read=its.is_read,
        restart=its.restart,
        owner=marked.owner,
        lost=its.lost,
    )
    return record, its.kept_bytes


def principal_of(i: bytes) -> str:
    """The principal in the field `i` of a record."""
    return _identity(i).principal


def session_bytes(record: SessionRecord) -> bytes:
    """A session as it is stored."""
    return _encode(
        StoredSession(
            record.principal, record.revision, record.capabilities, record.level, record.seen_at
        )
    )


def session_of(key: str, stored: bytes) -> SessionRecord:
    """A session from what `session_bytes` has made."""
    its = _session(stored)
    return SessionRecord(key, its.principal, its.revision, its.capabilities, its.level, its.seen_at)


def grant_bytes(grant: Grant) -> bytes:
    """A grant as it is stored."""
    reply_id = msgspec.json.encode(grant.reply_id)
    return _encode(
        StoredGrant(
            grant.session, grant.delivery, grant.stream, reply_id, grant.takes_over, grant.start
        )
    )


def grant_of(stored: bytes) -> tuple[int, Grant]:
    """The order in which a grant was saved, and the grant."""
    order, _, body = stored.partition(b":")
    its = _grant(body)
    reply_id: RequestId = msgspec.json.decode(its.reply_id, type=int | str)
    return int(order), Grant(
        its.session, its.delivery, its.stream, reply_id, its.takes_over, its.start
    )


def webhook_bytes(webhook: Webhook) -> bytes:
    """A webhook as it is stored."""
    return _encode(StoredWebhook(webhook.stream, webhook.url, webhook.body, webhook.attempts))


def webhook_of(id: bytes, due_at: float, stored: bytes) -> Webhook:
    """A webhook from what `webhook_bytes` has made."""
    its = _webhook(stored)
    if its.attempts < 0:
        raise ValueError("the number of attempts is negative")
    return Webhook(id.decode(), its.stream, its.url, its.body, due_at, its.attempts)


def principal_key(principal: str) -> str:
    """A key of fixed length for a principal, whose name may be long."""
    return hashlib.sha256(principal.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def member(record: Record) -> bytes:
    """A stream in an index: the bytes sort as the numbers do, which Lua could not compare."""
    return number_bytes(record.number) + record.stream.encode()


RUNS: Final = b"\0"  # before the members of an owner's streams that run
ENDED: Final = b"\1"  # and of the others


def owned_member(record: Record) -> bytes:
    """A stream in the index of its owner. Those that run come first: they are claimed first."""
    return (RUNS if record.outcome is Outcome.LIVE else ENDED) + member(record)


def number_bytes(number: int) -> bytes:
    """The beginning of the members of the stream with this number."""
    return (number + _SIGN).to_bytes(8)


def stream_in(found: bytes) -> str:
    """The stream of a member of an index. A member of another program leads to no stream."""
    return found[8:].decode(errors="replace")


Entry = tuple[str, float, bytes]  # the index, the score, the member


def indexed(record: Record | None) -> frozenset[Entry]:
    """The indexes that a record is in. Where all scores are 0, members sort by their bytes."""
    if record is None:
        return frozenset()
    its = member(record)
    found: list[Entry] = [("n", 0, its)]
    if record.owner or record.due_at is None:
        found.append((f"o:{record.owner}", 0, owned_member(record)))
    if record.is_wanted:
        whose = principal_key(record.principal)
        found.append((f"w:{whose}", 0, its))
        if record.due_at is not None and record.is_read:
            found.append((f"v:{whose}", 0, its))
    if record.due_at is not None and not record.owner:
        found.append(("e", record.due_at, its))
        if not record.is_wanted:
            found.append(("u", record.due_at, its))
    return frozenset(found)


def index_changes(before: Record | None, after: Record | None) -> list[Any]:
    """The operations of a commit that move a stream from its indexes to others."""
    if before is not None and after is not None and _index_fields(before) == _index_fields(after):
        return []  # as with almost all appends
    had, has = indexed(before), indexed(after)
    changes: list[Any] = []
    kept = {(index, its) for index, _, its in has}
    for index, _, its in had - has:
        if (index, its) not in kept:
            changes += ["M", index, its]
    for index, score, its in has - had:
        changes += ["A", index, repr(float(score)), its]
    return changes


def _index_fields(record: Record) -> tuple[Any, ...]:
    return (
        record.stream,
        record.number,
        record.owner,
        record.outcome is Outcome.LIVE,
        record.principal,
        record.is_wanted,
        record.is_read,
        record.due_at,
    )


LINES: Final = b"b"  # the field of an entry that is a stored run
LOST: Final = b"g"  # the field of an entry that stands for lost lines


def line_id(seq: int, count: int) -> str:
    """The id of a stored run in its Redis Stream: so `XRANGE` from a seq finds what follows."""
    return f"{seq}-{count}"


def number_in(found: bytes) -> int:
    """The number of a member of an index."""
    return int.from_bytes(found[:8]) - _SIGN


def names_in(stored: bytes) -> tuple[bytes, ...]:
    """The names of a stream, from the field `n` of its record."""
    return tuple(stored[at : at + NAME_BYTES] for at in range(0, len(stored), NAME_BYTES))


def granted_stream(field: bytes) -> str:
    """The stream in a field of a session's grants: its length, ':', itself, and the delivery."""
    length, _, rest = field.partition(b":")
    return rest[: int(length)].decode()


def post_of(fields: list[bytes]) -> tuple[tuple[bytes, bytes], Post]:
    """The identity of a post, and the post, from the fields of its entry in an inbox."""
    _, sender, _, count, _, stream, _, body = fields
    return (sender, count), Post(sender.decode(), stream.decode(), body)
