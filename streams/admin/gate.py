"""Decides which requests the operator's endpoint answers.

The operator's token is one of its own: a client's bearer token is refused here, and this token is
refused by the client's listeners, which do not know it. Browsers are let in only to pages of this
endpoint: a page of another site has another `Origin`, and a name that was pointed to this address
(DNS rebinding) is no `Host` of it.
"""

import hashlib
import hmac
import re
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

import trio

from streams.admin.endpoint import Access
from streams.errors import INTERNAL_ERROR, Refusal
from streams.exchange import HttpError, Request
from streams.logs import log
from streams.turns import RateLimit

# RFC 6750, 2.1, and RFC 9110, 11.1: the name of a scheme has no case.
_BEARER: Final = re.compile(r"bearer +([-A-Za-z0-9._~+/]+=*)", re.IGNORECASE | re.ASCII)

REQUESTS_MAX: Final = 400  # at once, of an operator
REQUESTS_PER_S: Final = 100.0  # and in the long run
# Wrong tokens are fewer. The right one is let in however many were wrong.
REFUSED_MAX: Final = 20
REFUSED_PER_S: Final = 2.0

_LATER: Final = (("retry-after", "1"),)

NO_TOKEN: Final = (
    "This needs the operator's token: send it as Authorization: Bearer. The log named its file "
    "when the server started; a client's token does not work here."
)
READ_ONLY: Final = "This server lets operators look and not change: start it with --admin-write."


class Token:
    """The operator's token, compared in constant time. Only its hash stays in memory."""

    def __init__(self, secret: str) -> None:
        self._digest = hashlib.sha256(secret.encode()).digest()

    def is_it(self, given: str) -> bool:
        """Whether this text is the token."""
        digest = hashlib.sha256(given.encode(errors="surrogateescape")).digest()
        return hmac.compare_digest(digest, self._digest)

    def derived(self, purpose: bytes) -> bytes:
        """A key for one purpose, which is void once the token changes."""
        return hmac.new(self._digest, purpose, hashlib.sha256).digest()


class TokenGate:
    """The gate of `--admin`: it wants the operator's token, or another proof of the operator.

    `why_refused` says what is wrong with a `Host`, or returns None. Without a token only routes
    that are open are answered. Another module may append to `proofs` what shows the operator too,
    as the cookie of a page that has asked for the token.
    """

    def __init__(
        self,
        token: Token | None,
        *,
        may_write: bool = False,
        why_refused: Callable[[str], str | None] = lambda host: None,
    ) -> None:
        self.token = token
        self.may_write = may_write
        self.proofs: list[Callable[[Request], bool]] = []
        self._why_refused = why_refused
        self._asked = RateLimit(REQUESTS_MAX, REQUESTS_PER_S)
        self._refused = RateLimit(REFUSED_MAX, REFUSED_PER_S)
        self._logged_at = -float("inf")

    def check(self, request: Request, access: Access) -> None:
        """See `streams.admin.endpoint.Gate`."""
        if access == "open":
            return
        self.check_browser(request)
        if not self.has_token(request) and not any(proof(request) for proof in self.proofs):
            raise self._stranger(request)
        if not self._asked.spend():
            raise HttpError(429, "Too many requests: ask less often.", _LATER)
        if access == "write" and not self.may_write:
            raise HttpError(403, READ_ONLY)

    def check_browser(self, request: Request) -> None:
        """Refuse requests that a page of another site may have caused. Raises `HttpError`."""
        if why := self._why_refused(request.headers.get("host", "")):
            raise HttpError(403, why)
        if not is_own_page(request):
            raise HttpError(403, "A page of another origin may not ask here.")

    def has_token(self, request: Request) -> bool:
        """Whether the request has the operator's token in its header."""
        match = _BEARER.fullmatch(request.headers.get("authorization", ""))
        return match is not None and self.token is not None and self.token.is_it(match[1])

    def is_known(self, secret: str) -> bool:
        """Whether this is the operator's token. Raises `HttpError` after too many wrong ones."""
        if self.token is not None and self.token.is_it(secret):
            return True
        if not self._refused.spend():
            raise _too_many()
        return False

    def _stranger(self, request: Request) -> HttpError:
        # One without any token guesses nothing. Counted, it would keep operators who are not yet
        # signed in from the form for the token.
        if "authorization" in request.headers and not self._refused.spend():
            return _too_many()
        now = trio.current_time()
        if now - self._logged_at >= 1.0:
            self._logged_at = now
            log.info("operator's request refused", path=request.path[:200])
        if self.token is None:
            lacks = "This server has no operator's token: start it with --admin-token-file."
            return HttpError(503, Refusal(INTERNAL_ERROR, lacks))
        return HttpError(401, NO_TOKEN, (("www-authenticate", 'Bearer realm="operators"'),))


class OwnerGate:
    """The gate of a socket that only the user of this process, and root, can connect to.

    That user may end the process anyway, so all is allowed.
    """

    may_write: Final = True

    def check(self, request: Request, access: Access) -> None:
        """See `streams.admin.endpoint.Gate`."""


def _too_many() -> HttpError:
    return HttpError(429, "Too many wrong tokens: try again later.", _LATER)


def is_own_page(request: Request) -> bool:
    """Whether a request comes from no page, or from one of this endpoint: same host and port.

    Cookies make no difference between ports, so another server of this machine is another origin.
    """
    origin = request.headers.get("origin")
    if origin is None:
        return request.headers.get("sec-fetch-site", "none") in ("none", "same-origin")
    try:
        return urlsplit(origin).netloc.lower() == request.headers.get("host", "").lower() != ""
    except ValueError:
        return False
