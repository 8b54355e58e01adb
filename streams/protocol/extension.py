"""The extension `mcp-streams/v1`: opt-in settings, positions, acks, the ends of deliveries, and
idempotency keys.
"""

import itertools
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

import msgspec

from streams import messages
from streams.errors import INVALID_PARAMS, Refusal
from streams.messages import POSITION, Message, RequestId, Run
from streams.protocol.dialects import DIALECTS, STREAMS
from streams.protocol.vocabulary import Ack, Dialect, read_params

EXTENSION: Final = "mcp-streams/v1"
ACK: Final = "notifications/stream/ack"
KEY: Final = "mcp-streams/idempotencyKey"  # in the `_meta` of a call's params
KEY_LETTERS_MAX: Final = 200
WEBHOOK: Final = "mcp-streams/webhook"  # in the same place: where events of the call are sent
_KEY: Final = KEY.encode()
_PLACES: Final = frozenset(["extensions", "experimental"])  # of a client's capabilities
_DIALECT_NAMES: Final = frozenset(each.capability for each in DIALECTS.values() if each.capability)
DECLARED_BYTES_MAX: Final = 1024  # of capabilities that are kept; usual ones have 200
EXPECTED: Final = "mcp-streams/expectedSeconds"  # in the `_meta` of a tool's listing


class Settings(msgspec.Struct, frozen=True):
    """The settings that a client opted in to. A plain MCP client opted in to none.

    With `replay_response` a resume over HTTP brings the stream's response as a separate message,
    and not inside the reply.
    """

    dialects: tuple[Dialect, ...] = ()
    positions: bool = False
    replay_response: bool = False


class _Extension(msgspec.Struct, rename="camel"):
    dialects: tuple[str, ...] = ("streams",)
    positions: bool = False
    replay_response: bool = False


class _Acked(msgspec.Struct, rename="camel"):
    stream_id: str
    seq: int


class Mark(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Replaces a call's idempotency key in the request that is stored."""

    name: str  # to which the key leads, in hexadecimal digits
    is_own: bool  # the key works only for the principal that made the call
    is_once: bool = False  # the server has derived the key from the call


class _Marks(msgspec.Struct):
    mark: Mark | None = msgspec.field(name=KEY, default=None)


class _Marked(msgspec.Struct):
    meta: _Marks | None = msgspec.field(name="_meta", default=None)


def declared(capabilities: Mapping[str, msgspec.Raw]) -> tuple[Settings, dict[str, Any]]:
    """A client's settings, and the part of its capabilities that is stored. Raises `Refusal`.

    Most clients declare the same, and a thousand of them may come back at once.
    """
    given = tuple((name, bytes(raw)) for name, raw in capabilities.items())
    is_short = sum(len(name) + len(raw) for name, raw in given) <= DECLARED_BYTES_MAX
    return (_declared if is_short else _declared.__wrapped__)(given)


@lru_cache(maxsize=64)
def _declared(given: tuple[tuple[str, bytes], ...]) -> tuple[Settings, dict[str, Any]]:
    capabilities = known_of({name: msgspec.Raw(raw) for name, raw in given})
    return settings_of(capabilities), understood(capabilities)


def settings_of(capabilities: Mapping[str, Any]) -> Settings:
    """The settings in a client's `capabilities`. Raises `Refusal` where they do not fit."""
    names = [name for name, dialect in DIALECTS.items() if dialect.capability in capabilities]
    chosen: list[_Extension] = []
    for place in ("experimental", "extensions"):
        extensions = capabilities.get(place)
        if isinstance(extensions, dict) and EXTENSION in extensions:
            try:
                chosen.append(msgspec.convert(extensions[EXTENSION], _Extension))
            except msgspec.ValidationError as error:
                where = f"capabilities.{place}[{EXTENSION!r}]"
                raise Refusal(INVALID_PARAMS, f"Bad settings in {where}: {error}.") from None
    names += itertools.chain.from_iterable(each.dialects for each in chosen)
    # An unknown dialect is no error: the client sees in which dialects its streams are announced.
    known = tuple(each for name, each in DIALECTS.items() if name in names and each.announcing)
    if not chosen:
        # The bare capability is enough here: a client that cannot take separate responses, such as
        # a stock client, does not declare it.
        return Settings(known, replay_response=STREAMS.capability in capabilities)
    return Settings(
        known,
        positions=any(each.positions for each in chosen),
        replay_response=any(each.replay_response for each in chosen),
    )


def without_ours(capabilities: Mapping[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """A client's capabilities without those of the dialects and of this extension."""
    kept = {name: raw for name, raw in capabilities.items() if name not in _DIALECT_NAMES}
    for place in _PLACES & kept.keys():
        with suppress(ValueError):
            given = messages.decode(kept[place], dict[str, msgspec.Raw])
            if given.pop(EXTENSION, None) is not None:
                kept[place] = msgspec.Raw(messages.encode(given))
                if not given:
                    del kept[place]
    return kept


def merged(capabilities: Any, ours: Mapping[str, Any]) -> dict[str, Any]:
    """A backend's capabilities with our extension, under both names for extensions."""
    members = _members(capabilities)
    added = {
        place: {**_members(members.get(place)), **ours} for place in ("extensions", "experimental")
    }
    return {**members, **added}


def _members(given: Any) -> dict[str, Any]:
    """The members of an object; none where a backend has sent something else."""
    if isinstance(given, msgspec.Raw):
        try:
            return dict(messages.decode(given, dict[str, msgspec.Raw]))
        except ValueError:
            return {}
    return dict(given) if isinstance(given, Mapping) else {}


def known_of(capabilities: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """The names of all capabilities, and the settings of this extension in them.

    Nothing else is decoded, because a client may send 4 MiB of empty objects.
    """
    known: dict[str, Any] = {name: {} for name in capabilities}
    for place in ("experimental", "extensions"):
        try:
            given = messages.decode(capabilities.get(place, b"{}"), dict[str, msgspec.Raw])
            if EXTENSION in given:
                known[place] = {EXTENSION: messages.decode(given[EXTENSION], Any)}
        except ValueError:
            continue  # not a readable object: there are no settings in it
    return known


def understood(capabilities: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a client's capabilities that `settings_of` reads, with the same result.

    It is stored with the session. So it has at most some hundred bytes, whatever the client sends.
    """
    names = [dialect.capability for dialect in DIALECTS.values()]
    kept: dict[str, Any] = {name: {} for name in names if name and name in capabilities}
    for place in ("experimental", "extensions"):
        extensions = capabilities.get(place)
        if isinstance(extensions, dict) and EXTENSION in extensions:
            given = extensions[EXTENSION]
            chosen = {
                name: given[name] for name in _Extension.__struct_encode_fields__ if name in given
            }
            if "dialects" in chosen:
                chosen["dialects"] = [name for name in DIALECTS if name in chosen["dialects"]]
            kept[place] = {EXTENSION: chosen}
    return kept


def advertisement(memory: str) -> dict[str, Any]:
    """The server's capabilities under `extensions` and `experimental`.

    `memory` identifies the servers that look up idempotency keys in the same place.
    """
    return {
        EXTENSION: {"dialects": list(DIALECTS), "positions": True, "idempotencyKeys": memory},
    }


def key_in(given: Any) -> str | None:
    """The idempotency key of a call, if it has one. Raises `Refusal` for an invalid one."""
    if given is msgspec.UNSET:
        return None
    if isinstance(given, str) and 1 <= len(given) <= KEY_LETTERS_MAX:
        return given
    raise Refusal(
        INVALID_PARAMS,
        f"Bad params: _meta[{KEY!r}] must be a string of 1 to {KEY_LETTERS_MAX} characters.",
    )


def marked(request: Message, mark: Mark) -> bytes:
    """A call as it is stored: with `mark` in place of its idempotency key.

    The key is not stored, because a long one opens the call to any caller.
    """
    assert isinstance(request.id, int | str)
    params: dict[str, Any] = dict(messages.decode(request.params, dict[str, msgspec.Raw]))
    has_meta = bytes(params.get("_meta", b"null")) != b"null"
    given = messages.decode(params["_meta"], dict[str, msgspec.Raw]) if has_meta else {}
    meta: dict[str, Any] = dict(given)
    kept = params | {"_meta": meta | {KEY: mark}}
    return messages.request(request.id, str(request.method), kept).rstrip(b"\n")


def mark_of(params: msgspec.Raw) -> Mark | None:
    """The mark of a stored call; None where the call had no idempotency key."""
    if _KEY not in bytes(params):
        return None
    try:
        meta = messages.decode(params, _Marked).meta
    except ValueError:
        return None  # a call from before there were keys
    return meta.mark if meta else None


def resumed(request_id: RequestId, ended: str, response: bytes | None = None) -> bytes:
    """The reply to a resume, with the reason why the delivery has ended.

    `response` is the stream's final response, where that is embedded.
    """
    meta: dict[str, Any] = {"mcp-streams/ended": ended}
    if response is not None:
        meta["mcp-streams/response"] = msgspec.Raw(response.rstrip(b"\n"))
    return messages.result(request_id, {"_meta": meta})


def position(stream: str, run: Run) -> bytes:
    """The header that goes ahead of a run."""
    return messages.notification(POSITION, {"streamId": stream, "seq": run.seq, "count": run.count})


def ack(params: msgspec.Raw) -> Ack:
    """The ack in a client's notification. Raises `Refusal` where it does not fit."""
    acked = read_params(params, _Acked)
    return Ack(acked.stream_id, acked.seq)
