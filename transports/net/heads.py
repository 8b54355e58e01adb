"""Heads of HTTP requests as nearly all clients write them, read at a fifth of what h11 takes.

Only what h11 would read in the very same way counts as such: no field that changes where the
request ends but a plain Content-Length, nothing folded, nothing but printable ASCII. Everything
else, errors above all, is left to h11.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

# RFC 9110, 5.6.2: a token; and RFC 9112, 3 and 5, without what is obsolete.
_HEAD: Final = re.compile(
    rb"([A-Z]{3,7}) (/[!-~]*) HTTP/1\.1\r\n((?:[-!#$%&'*+.^_`|~0-9A-Za-z]+:[\t -~]*\r\n)+)\r\n"
)
# What these say, h11 knows: how the request ends, and whether somebody waits for leave to send it.
_SPECIAL: Final = ("transfer-encoding", "expect")
_LENGTH: Final = re.compile(r"[0-9]{1,9}")


class PlainHead(NamedTuple):
    """A head, and how much of what came it takes; the names of `fields` are in lower case."""

    method: str
    target: str
    fields: Mapping[str, Sequence[str]]
    size: int

    @property
    def body_bytes(self) -> int:
        """How long the body is that follows."""
        return int(self.fields.get("content-length", ("0",))[0])


def plain_head(data: bytes, bytes_max: int, fields_max: int) -> PlainHead | None:
    """The head that `data` begins with; None where it has not come whole, is longer than either
    maximum, or is not as plain as that.
    """
    match = _HEAD.match(data)
    if match is None or match.end() > bytes_max:
        return None
    method, target, lines = match[1].decode(), match[2].decode(), match[3].decode()
    fields: dict[str, list[str]] = {}
    named = lines.split("\r\n")[:-1]
    for line in named:
        name, _, value = line.partition(":")
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
