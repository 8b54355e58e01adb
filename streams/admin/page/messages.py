"""One whole message, for people."""

from typing import Final

import msgspec

# Of one message on a page of its own; browsers take long for more.
WHOLE_BYTES_MAX: Final = 256 * 1024


def pretty(line: bytes) -> tuple[str, int]:
    """A message, indented, and how many bytes of it are left out."""
    left_out = max(0, len(line) - WHOLE_BYTES_MAX)
    if left_out:
        return line[:WHOLE_BYTES_MAX].decode(errors="replace"), left_out
    try:
        return msgspec.json.format(line, indent=2).decode(errors="replace"), 0
    except (ValueError, RecursionError):  # too deep to be indented
        return line.decode(errors="replace"), 0
