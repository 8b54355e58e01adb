"""Blocks: whole lines in one piece, as they came, and how to find one's way in them.

A look at each line would cost more than all the rest of receiving. What is done here goes over many
lines at once, and in memory order: searches for a text, counts of a byte.
"""

from typing import Final

# What is handed on in one piece. Messages of one size make pieces of the former, whatever comes
# makes none above the latter.
LINES_AIM: Final = 250
LINES_MAX: Final = 300

# From this length on it is faster to go from newline to newline than to count them: `find` skips
# what lies between, `count` looks at every byte.
_LONG_BYTES: Final = 700

_START: Final = b'{"jsonrpc":"2.0","method":"notifications/'
_NEXT: Final = b"\n" + _START
_NEXT_HEADER: Final = _NEXT + b'stream/position"'


def measure(block: bytes, at: int, most: int) -> tuple[int, int]:
    """Where the next piece of `block` ends, and how many lines it has: at most `most`.

    `at` is where a line begins. A piece goes no further than to the next position header.
    """
    first = block.index(b"\n", at) + 1 - at
    if most == 1:
        return at + first, 1
    end = min(at + first * LINES_AIM, len(block))
    if header := block.find(_NEXT_HEADER, at, end) + 1:
        end = header
    elif end < len(block):
        end = block.rfind(b"\n", at, end) + 1
    count = _walk(block, at, end) if first > _LONG_BYTES else block.count(b"\n", at, end)
    if count <= most:
        return end, count
    return skip(block, at, most), most


def skip(block: bytes, at: int, count: int) -> int:
    """Where the line `count` lines further on begins."""
    for _ in range(count):
        at = block.index(b"\n", at) + 1
    return at


def is_plain(piece: bytes, count: int) -> bool:
    """Whether all `count` lines begin as our servers write notifications.

    There are no blank lines among them then. Nothing is said about a line that is written in
    another way.
    """
    # An unescaped newline stands in no JSON string.
    return piece.startswith(_START) and piece.count(_NEXT) == count - 1


def _walk(block: bytes, at: int, end: int) -> int:
    count = 0
    while at < end:
        at = block.index(b"\n", at) + 1
        count += 1
    return count
