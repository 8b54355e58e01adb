"""What a page's token, or an idempotency key, is bound to: one call, by what it says and not by how
that was written, and whose it is.
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
AUTHORITY_LETTERS: Final = 32  # what nobody guesses: 128 bits, be it in hexadecimal digits


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
    """Among whose calls an idempotency key is looked up.

    Where nobody has vouched for the principal, a long key is itself the authority, wherever it
    comes from; a short one leads to this principal's own calls alone, since two strangers may well
    choose the same.
    """
    if len(key) >= AUTHORITY_LETTERS:
        return authenticated(principal)
    return principal


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number
