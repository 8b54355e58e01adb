"""What a page's token is bound to: one call, by what it says and not by how that was written."""

import hashlib
import json
from typing import Final

import msgspec

from streams.errors import INVALID_PARAMS, Refusal
from streams.vocabulary import read_params

_METHOD: Final = "tools/call"


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def call_digest(params: msgspec.Raw, principal: str) -> bytes:
    """The SHA-256 of a call's name and arguments as JSON values, and of who calls.

    The order of keys does not count, nor does `1.0` for `1` or `null` for no arguments. Raises
    `Refusal` for what is no call.
    """
    call = read_params(params, _Call)
    try:
        given = json.loads(bytes(call.arguments), parse_float=_number)
        arguments = {} if given is None else given
        text = json.dumps([_METHOD, call.name, arguments, principal], sort_keys=True)
    except (ValueError, RecursionError):
        raise Refusal(
            INVALID_PARAMS, "Bad params: arguments nested too deeply, or too long a number."
        ) from None
    return hashlib.sha256(text.encode()).digest()


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


def owner_of(principal: str) -> str:
    """Who alone may ask for its pages: a principal that somebody has vouched for, else nobody.

    An anonymous connection is not the same one after a reconnect: there the token is the authority.
    """
    return principal if principal.startswith(("os(", "bearer(")) else ""
