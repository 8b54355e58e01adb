"""`mcp-streams token`: bearer tokens that this server makes and accepts."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import cyclopts

from streams.cli.base import DONE, USAGE, complain

if TYPE_CHECKING:
    from streams.auth.tokens import Token

FILE: Final = Path("tokens.jsonl")
DAY_S: Final = 86_400
DAYS_MAX: Final = 36_500  # a century

token: Final = cyclopts.App(
    name="token",
    help="Make, list and revoke the bearer tokens that serve --auth-tokens accepts.",
)


@token.command
def new(
    name: str,
    /,
    *,
    file: Path = FILE,
    to: Path | None = None,
    expires: float | None = None,
    scope: tuple[str, ...] = (),
    json: bool = False,
) -> int:
    """Make a bearer token, and print it or write it to a file: once, as only its hash is kept.

    Parameters
    ----------
    name
        The name that the server gives to a caller with this token. A name may have several tokens.
    file
        The file that keeps its hash; it is made if it is missing.
    to
        Write the token to this new file, which only you may read, and do not print it.
    expires
        The number of days after which it expires; without this option, never.
    scope
        A scope that tools may require, or several with blanks between them. May be repeated.
    json
        Print it with its name, id, times and scopes, as JSON; with --to, the name of the file in
        its place.
    """
    from streams.auth.tokens import TokensUnusable, add, add_to

    if expires is not None and not 0 < expires <= DAYS_MAX:
        return complain(f"--expires: write days, more than 0 and up to {DAYS_MAX}.")
    try:
        lifetime_s = None if expires is None else expires * DAY_S
        scopes = " ".join(scope).split()
        if to is not None:
            token = add_to(to, file, name, lifetime_s, scopes)
            shown = {"to": str(to), **_as_dict(token)}
            _show(shown, f"The token {token.id} of {name} is in {to}.", as_json=json)
            return DONE
        secret, token = add(file, name, lifetime_s, scopes)
    except ValueError as error:
        return complain(f"{error}.")
    except TokensUnusable as error:
        return complain(str(error))
    except OSError as error:
        return complain(f"{file} cannot be written: {error}.")
    _show({"token": secret, **_as_dict(token)}, secret, as_json=json)
    return DONE


@token.command(name="list")
def list_(*, file: Path = FILE, json: bool = False) -> int:
    """List the bearer tokens: id, expiry, name, and scopes.

    Parameters
    ----------
    file
        The file that keeps their hashes.
    json
        Print a list of objects.
    """
    from streams.auth.tokens import TokensUnusable, read

    try:
        found = read(file)
    except TokensUnusable as error:
        return complain(str(error))
    except OSError as error:
        return complain(f"{file} cannot be read: {error}.")
    lines = ["  ".join((token.id, _expiry(token), token.name, *token.scopes)) for token in found]
    _show([_as_dict(token) for token in found], "\n".join(lines), as_json=json)
    return DONE


@token.command
def revoke(what: str, /, *, file: Path = FILE, json: bool = False) -> int:
    """Revoke all bearer tokens of a name, or one by its id. A running server obeys at once.

    Parameters
    ----------
    what
        A name, or the id that "mcp-streams token list" prints.
    file
        The file that keeps their hashes.
    json
        Print the revoked tokens, as a list of objects.
    """
    from streams.auth import tokens as kept

    try:
        gone = kept.revoke(file, what)
    except kept.TokensUnusable as error:
        return complain(str(error))
    except OSError as error:
        return complain(f"{file} cannot be written: {error}.")
    said = f"Revoked: {', '.join(token.id for token in gone)}" if gone else f"No token: {what}"
    _show([_as_dict(token) for token in gone], said, as_json=json)
    return DONE if gone else USAGE


def _as_dict(token: "Token") -> dict[str, Any]:
    return {
        "id": token.id,
        "name": token.name,
        "createdAt": _day(token.created_at),
        "expiresAt": None if token.expires_at is None else _day(token.expires_at),
        "scopes": list(token.scopes),
    }


def _expiry(token: "Token") -> str:
    return "never expires       " if token.expires_at is None else _day(token.expires_at)


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _show(content: Any, text: str, *, as_json: bool) -> None:
    from streams.cli.actions.output import as_json_text

    if as_json or text:
        print(as_json_text(content) if as_json else text)
