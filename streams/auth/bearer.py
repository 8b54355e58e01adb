"""Who may come in: whoever shows a bearer token that the server takes.

An `Authenticator` looks at the head of a request, before it reads more, and says whose it is:
`bearer(issuer, subject)`, over every transport and from one connection to the next. What is wrong
with a token goes to the log; its bearer gets the one answer.

Two kinds of token are known, each in a module that is imported only where it is used: those that
this server has made (`streams.auth.tokens`), and JWTs that another has signed (`streams.auth.jwt`).
"""

import re
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import trio

from streams.errors import INTERNAL_ERROR, Refusal, refusal
from streams.exchange import Caller, Head, HttpError
from streams.logs import log

TOKEN_BYTES_MAX: Final = 8 * 1024  # those of some companies have several kilobytes
SUBJECT_LETTERS_MAX: Final = 255  # OpenID Connect, section 2, has the same

# For how long it is taken for granted that a token holds, however late it expires: after that a
# connection that it has opened is looked at again, and a token that was revoked has closed it.
RECHECK_S: Final = 30.0

# What whoever comes while tokens cannot be checked is told to wait.
RETRY_AFTER_S: Final = 15

LOG_EVERY_S: Final = 1.0

# One answer whatever is wrong with it: see the head of this module.
_INVALID: Final = "The token is unknown, expired or revoked, or is not meant for this server."

# RFC 6750, 2.1, and RFC 9110, 11.1: the name of a scheme has no case.
_BEARER: Final = re.compile(r"bearer +([-A-Za-z0-9._~+/]+=*)", re.IGNORECASE | re.ASCII)


class InvalidToken(Exception):
    """A token that does not hold; why is for the log."""


class CannotVerify(Exception):
    """Whether a token holds cannot be told now; why is for the log."""


class Verifier(Protocol):
    """Knows one kind of token."""

    def recognizes(self, token: str) -> bool:
        """Whether the token looks like one that may be known here."""

    async def verify(self, token: str) -> Caller:
        """Whose token it is. Raises `InvalidToken`, or `CannotVerify`."""

    async def reload(self) -> None:
        """Read again what tokens are checked by; the log tells where that cannot be used."""


class Authenticator:
    """An `Admit` of a listener.

    `is_public` are requests that anybody may make; `metadata_url` is where whoever is turned away
    reads how to get a token, None where there is no such place. `scopes` are those that the tools
    need.
    """

    def __init__(
        self,
        verifiers: Sequence[Verifier],
        *,
        is_public: Callable[[Head], bool] = lambda head: False,
        metadata_url: Callable[[Head], str | None] = lambda head: None,
        scopes: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._verifiers = tuple(verifiers)
        self._logged_at = -float("inf")
        self._unlogged = 0
        self._is_open_to = is_public
        self._metadata_url = metadata_url
        self._scopes = scopes

    async def admit(self, head: Head) -> Caller | None:
        """Whose request it is; None for one that anybody may make. Raises `HttpError`."""
        if self._is_open_to(head):
            return None
        given = head.headers.get("authorization", "")
        try:
            return await self._verify(given)
        except InvalidToken as error:
            self._log_refusal(head, str(error))
            raise self._denied(head, has_token=given[:7].lower() == "bearer ") from None
        except CannotVerify as error:
            log.warning("nobody can be let in now", why=str(error))
            busy = Refusal(INTERNAL_ERROR, "Tokens cannot be checked now: try again later.")
            raise HttpError(503, busy, (("retry-after", f"{RETRY_AFTER_S}"),)) from None

    def _log_refusal(self, head: Head, why: str) -> None:
        """Strangers may come by the thousand: the log is not theirs to fill."""
        now = trio.current_time()
        self._unlogged += 1
        if now - self._logged_at >= LOG_EVERY_S:
            log.info("turned away", why=why, path=head.path[:200], times=self._unlogged)
            self._logged_at, self._unlogged = now, 0

    async def _verify(self, given: str) -> Caller:
        if not given:
            raise InvalidToken("no token")
        match = _BEARER.fullmatch(given)
        if match is None or len(match[1]) > TOKEN_BYTES_MAX:
            raise InvalidToken("no bearer token, or too long for one")
        token = match[1]
        for verifier in self._verifiers:
            if verifier.recognizes(token):
                return await verifier.verify(token)
        raise InvalidToken("no token of a kind that is taken here")

    def _denied(self, head: Head, *, has_token: bool) -> HttpError:
        """RFC 6750, 3: who has sent no token is not told of an error."""
        error, why = ("invalid_token", _INVALID) if has_token else (None, None)
        url = self._metadata_url(head)
        header = challenge(error, why, scopes=self._scopes(), metadata_url=url)
        return HttpError(401, refusal("unauthorized"), (header,))


def challenge(
    error: str | None,
    description: str | None,
    *,
    scopes: Sequence[str],
    metadata_url: str | None,
) -> tuple[str, str]:
    """The header that says which token is wanted: RFC 6750, 3, and RFC 9728, 5.1.

    Without quotes and backslashes in any of them, which need no escaping then.
    """
    told = {
        "error": error,
        "scope": " ".join(scopes),
        "resource_metadata": metadata_url,
        "error_description": description,
    }
    said = ", ".join(f'{name}="{value}"' for name, value in told.items() if value)
    return "www-authenticate", f"Bearer {said}".rstrip()


def principal_of(issuer: str, subject: str) -> str:
    """Who a bearer is to everybody else. Raises `InvalidToken` for what cannot be a name."""
    if not (0 < len(subject) <= SUBJECT_LETTERS_MAX and subject.isprintable()):
        raise InvalidToken("the subject is empty, too long, or cannot be printed")
    return f"bearer({issuer}, {subject})"
