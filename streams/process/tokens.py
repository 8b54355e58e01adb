"""The bearer token that a command sends."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from streams.errors import UnsafeFile
from streams.permissions import read_secret
from streams.process.options import TOKEN_VARIABLE

TOKEN_FILE_BYTES_MAX: Final = 64 * 1024  # eight times what our servers accept


def token_of(file: Path | None) -> str | Callable[[], str] | None:
    """The bearer token to send: read from the file for each new connection, or from the variable.

    The variable is removed from the environment, so that a server which is started does not see it.
    Raises `ValueError` if the file cannot be used.
    """
    given = os.environ.pop(TOKEN_VARIABLE, None)
    if file is None:
        return given
    try:
        _read_token(file)  # report an unusable file before connecting
    except UnsafeFile as error:
        raise ValueError(f"{error}.") from None
    except OSError as error:
        raise ValueError(f"--token-file {file} cannot be read: {error.strerror}.") from None
    return lambda: _read_token(file)


def _read_token(file: Path) -> str:
    """Raises `UnsafeFile` if other users may read or change the file, or another `OSError`."""
    return read_secret(file, TOKEN_FILE_BYTES_MAX).decode(errors="replace").strip()
