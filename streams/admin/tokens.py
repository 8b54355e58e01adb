"""The file of the operator's token.

`--admin-token-file` names one. Without that, a token is made at the first start and kept in the
user's folder of state, in a file named by the address: there the commands of the same user find it.
"""

import os
import re
from pathlib import Path
from typing import Final

from streams.errors import UnsafeFile
from streams.files import write_whole
from streams.keys import new_bearer
from streams.permissions import read_secret

TOKEN_BYTES_MAX: Final = 4096
TOKEN_LETTERS_MIN: Final = 16  # fewer could be guessed

_TOKEN: Final = re.compile(r"[-A-Za-z0-9._~+/]+=*", re.ASCII)
_NOT_TYPABLE: Final = re.compile(r"[^A-Za-z0-9_.-]+")


class TokenUnusable(Exception):
    """The file has no usable token. The message says what to do."""


def read_token(file: Path, *, follows_links: bool = True) -> str:
    """The token in a file that only its owner can read. Raises `TokenUnusable`."""
    try:
        content = read_secret(file, TOKEN_BYTES_MAX, follows_links=follows_links)
    except UnsafeFile as error:
        raise TokenUnusable(f"{error}.") from None
    except OSError as error:
        raise TokenUnusable(f"{file} cannot be read: {error.strerror}.") from None
    token = content.decode(errors="replace").strip()
    if len(content) > TOKEN_BYTES_MAX or not _TOKEN.fullmatch(token):
        raise TokenUnusable(f"{file} has no token: one line of letters, digits and -._~+/ is one.")
    if len(token) < TOKEN_LETTERS_MIN:
        raise TokenUnusable(
            f"The token in {file} is too short: take {TOKEN_LETTERS_MIN} letters or more, such as "
            "those of `openssl rand -hex 32`."
        )
    return token


def path_for(folder: Path, address: str) -> Path:
    """The file of the token for this address, in the user's folder of state."""
    return folder / f"admin-{_NOT_TYPABLE.sub('-', address).strip('-')}.token"


def kept_token(file: Path) -> str:
    """The token in this file, which is made if it is missing. Raises `TokenUnusable`."""
    if not os.path.lexists(file):
        try:
            write_whole(file, f"{new_bearer()}\n".encode(), os.link)
        except FileExistsError:
            pass  # another process was faster, and its token is as good
        except OSError as error:
            raise TokenUnusable(f"{file} cannot be written: {error.strerror}.") from None
    return read_token(file, follows_links=False)
