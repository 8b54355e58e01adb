"""Messages of other servers with usual faults: what is meant is passed on as JSON-RPC.

A line that cannot be mended may still show which request it answers, so that this request ends.
"""

import json
import math
import re
from contextlib import suppress
from typing import Any, Final

from streams import messages
from streams.messages import RequestId

# A longer line is not mended: its decoding takes 100 ms, in which the server does nothing else.
MENDED_BYTES_MAX: Final = 1024 * 1024

ENDS_BYTES: Final = 1024  # of a long line, at each end: the id of a response is in one of them

# How a response that is too long to be parsed begins or ends. The SDKs in TypeScript write the id
# last, the one in Python first.
_ID: Final = rb'"id"\s*:\s*("[^"\\]{1,200}"|-?[0-9]{1,18})\s*'
_HEAD: Final = re.compile(rb'\s*{\s*(?:"jsonrpc"\s*:\s*"2.0"\s*,\s*)?' + _ID + rb",")
_TAIL: Final = re.compile(_ID + rb'(?:,\s*"jsonrpc"\s*:\s*"2.0"\s*)?}\s*\Z')
_METHOD: Final = re.compile(rb'\s*{[^][{}]*"method"\s*:')


def sound(line: bytes) -> bytes | None:
    """A message as it came, or mended; None for a line that is no message."""
    try:
        if not line.isascii():
            line.decode()  # msgspec does not check UTF-8 in values that it skips
        messages.look(line)
    except (ValueError, RecursionError):
        return mend(line)
    return line


def mend(line: bytes) -> bytes | None:
    """A message with faults that lenient clients take, without them; None for anything else.

    They are: text that is no UTF-8, half of a surrogate pair, NaN and Infinity, an id with a
    fraction of 0, and no `jsonrpc`.
    """
    if len(line) > MENDED_BYTES_MAX or not line.lstrip(b"\xef\xbb\xbf \t").startswith(b"{"):
        return None
    with suppress(ValueError, RecursionError):
        found = json.loads(line.decode("utf-8-sig", errors="replace"))
        if isinstance(found, dict) and ("method" in found or "result" in found or "error" in found):
            members: dict[str, Any] = {"jsonrpc": "2.0"} | found
            if isinstance(found.get("id"), float) and found["id"].is_integer():
                members["id"] = int(found["id"])
            mended = messages.encode(_sound(members))
            messages.look(mended)
            return mended
    return None


def _sound(value: Any) -> Any:
    """A value that JSON can express."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_sound(each) for each in value]
    if isinstance(value, dict):
        return {_sound(name): _sound(each) for name, each in value.items()}
    return value


def has_method(head: bytes) -> bool:
    """Whether a line that begins so is a request or a notification."""
    return _METHOD.match(head) is not None


def id_in(head: bytes, tail: bytes) -> RequestId | None:
    """The id of a message of which only the ends are known."""
    found = _HEAD.match(head) or _TAIL.search(tail)
    try:
        return messages.decode(found[1], RequestId) if found else None  # type: ignore[arg-type]
    except ValueError:
        return None  # no UTF-8, or a number with leading zeros
