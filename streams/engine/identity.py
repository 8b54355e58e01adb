"""The identity of a call, to which page tokens and idempotency keys are bound.

It is made of the tool, the arguments as JSON values, and the caller.
"""

import hashlib
import json
from typing import Final

import msgspec

from streams.errors import INVALID_PARAMS, Refusal
from streams.exchange import authenticated
from streams.messages import uncollected
from streams.protocol.vocabulary import read_params

_METHOD: Final = "tools/call"
AUTHORITY_LETTERS: Final = 32  # too long to be guessed: 128 bits even in hexadecimal digits


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def call_digest(params: msgspec.Raw, principal: str) -> bytes:
    """The SHA-256 of a call's tool, its arguments as JSON values, and its principal.

    The order of keys makes no difference, nor does `1.0` for `1`, or `null` for no arguments.
    Raises `Refusal` where `params` are not those of a call.
    """
    call = read_params(params, _Call)
    try:
        encoded = bytes(call.arguments)
        with uncollected(len(encoded)):
            given = json.loads(encoded, parse_float=_number)
            arguments = {} if given is None else given
            text = json.dumps([_METHOD, call.name, arguments, principal], sort_keys=True)
    except (ValueError, RecursionError):
        raise Refusal(
            INVALID_PARAMS, "Bad params: arguments nested too deeply, or too long a number."
        ) from None
    return hashlib.sha256(text.encode()).digest()


def scope_of(key: str, principal: str) -> str:
    """The principal among whose calls an idempotency key is looked up; "" for all anonymous ones.

    Without authentication a long key is the authority itself, over any connection. A short one
    leads only to the calls of this principal, since two clients may choose the same short key.
    """
    if len(key) >= AUTHORITY_LETTERS:
        return authenticated(principal)
    return principal


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number
