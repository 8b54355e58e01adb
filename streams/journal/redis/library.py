"""The library of Lua functions, under a name that tells its version.

Two versions of this program have two libraries beside each other, so that replicas can be upgraded
one after the other.
"""

import hashlib
from importlib.resources import files
from typing import Final

_SOURCE: Final = files(__package__).joinpath("library.lua").read_text()
VERSION: Final = hashlib.sha256(_SOURCE.encode()).hexdigest()[:8]
NAME: Final = f"mcp_streams_{VERSION}"
CODE: Final = f"#!lua name={NAME}\n{_SOURCE.replace('@', f'{NAME}_')}".encode()


def function(name: str) -> bytes:
    """The name under which a function of the library is called."""
    return f"{NAME}_{name}".encode()
