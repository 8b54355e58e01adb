"""Our own extension: what a client opts in to, numbers, acks, and why a delivery is over."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from streams import messages
from streams.dialects import DIALECTS
from streams.errors import INVALID_PARAMS, Refusal
from streams.messages import RequestId, Run
from streams.vocabulary import Ack, Dialect, read_params

EXTENSION: Final = "mcp-streams/v1"
POSITION: Final = "notifications/stream/position"
ACK: Final = "notifications/stream/ack"
EXPECTED: Final = "mcp-streams/expectedSeconds"  # in the `_meta` of a tool's listing


class Settings(msgspec.Struct, frozen=True):
    """What a client opted in to. A plain MCP client opted in to nothing."""

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


def settings_of(capabilities: Mapping[str, Any]) -> Settings:
    """What these client `capabilities` opt in to. Raises `Refusal` where they do not fit."""
    names = [name for name, dialect in DIALECTS.items() if dialect.capability in capabilities]
    positions = replay_response = False
    for place in ("experimental", "extensions"):
        extensions = capabilities.get(place)
        if isinstance(extensions, dict) and EXTENSION in extensions:
            try:
                chosen = msgspec.convert(extensions[EXTENSION], _Extension)
            except msgspec.ValidationError as error:
                where = f"capabilities.{place}[{EXTENSION!r}]"
                raise Refusal(INVALID_PARAMS, f"Bad settings in {where}: {error}.") from None
            names += chosen.dialects
            positions |= chosen.positions
            replay_response |= chosen.replay_response
    # A dialect that this server does not speak is not an error: the client sees what is announced.
    known = tuple(each for name, each in DIALECTS.items() if name in names and each.announcing)
    return Settings(known, positions, replay_response)


def advertisement() -> dict[str, Any]:
    """What the server says of itself, under `extensions` and `experimental`."""
    return {EXTENSION: {"dialects": list(DIALECTS), "positions": True}}


def resumed(request_id: RequestId, ended: str, response: bytes | None = None) -> bytes:
    """The reply to a resume, which says why this delivery is over.

    `response` is the stream's final response, where that is not sent on its own.
    """
    meta: dict[str, Any] = {"mcp-streams/ended": ended}
    if response is not None:
        meta["mcp-streams/response"] = msgspec.Raw(response.rstrip(b"\n"))
    return messages.result(request_id, {"_meta": meta})


def position(stream: str, run: Run) -> bytes:
    """The header that goes ahead of a run."""
    return messages.notification(POSITION, {"streamId": stream, "seq": run.seq, "count": run.count})


def ack(params: msgspec.Raw) -> Ack:
    """What a client confirms."""
    acked = read_params(params, _Acked)
    return Ack(acked.stream_id, acked.seq)
