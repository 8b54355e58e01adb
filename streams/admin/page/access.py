"""How a browser shows that an operator uses it: a form asks for the token, a cookie stands for it.

The cookie is a keyed hash of the time at which it expires, so nothing is kept for it: it survives a
restart, and is void once the token changes. Scripts cannot read it, and browsers send it with
requests of this site only. All ports of a host share their cookies, so its name has a part that
depends on the token, and a form that changes something has a token of its own, made from the
cookie.
"""

import hashlib
import hmac
import re
from typing import Final
from urllib.parse import parse_qsl

from streams.admin.gate import Token, TokenGate
from streams.clock import wall
from streams.exchange import HttpError, Request

HOLDS_S: Final = 12 * 3600  # a day's work; then the token is asked for again
FIELDS_MAX: Final = 200  # of a form
_VALUE: Final = re.compile(r"([0-9]{1,12})\.([0-9a-f]{64})", re.ASCII)
_FORM: Final = "application/x-www-form-urlencoded"


class Visitors:
    """Decides which browsers are an operator's. Appended to `TokenGate.proofs`."""

    def __init__(self, gate: TokenGate, changes: re.Pattern[str]) -> None:
        """`changes` are the paths of forms, which check `form_token` themselves."""
        self._gate = gate
        self._changes = changes

    def is_operator(self, request: Request) -> bool:
        """Whether the request has a valid cookie, and reads, or comes from a form of the page."""
        is_allowed = request.method in ("GET", "HEAD") or bool(
            request.method == "POST" and self._changes.fullmatch(request.path)
        )
        return is_allowed and self._cookie(request) is not None

    def welcome(self, form: dict[str, str]) -> str:
        """The `Set-Cookie` for one who has sent the operator's token in a form.

        Raises `HttpError`.
        """
        given = form.get("token", "").strip()
        if self._gate.token is None:
            raise HttpError(503, "This server has no operator's token: see --admin-token-file.")
        if not self._gate.is_known(given):
            raise HttpError(403, "This is not the operator's token of this server.")
        expires = int(wall()) + HOLDS_S
        value = f"{expires}.{_mac(self._gate.token, f'visit {expires}')}"
        return f"{self._name}={value}; Max-Age={HOLDS_S}; {_ATTRIBUTES}"

    @property
    def farewell(self) -> str:
        """The `Set-Cookie` that removes the cookie."""
        return f"{self._name}=; Max-Age=0; {_ATTRIBUTES}"

    def form_token(self, request: Request) -> str:
        """The token for forms of the page that answers this request."""
        cookie = self._cookie(request)
        token = self._gate.token
        return "" if cookie is None or token is None else _mac(token, f"form {cookie}")

    def check_form(self, request: Request, form: dict[str, str]) -> None:
        """Refuse a form that no page of ours has made for this browser. Raises `HttpError`.

        A program that sends the operator's token itself needs no form.
        """
        if self._gate.has_token(request):
            return
        wanted = self.form_token(request)
        if not wanted or not hmac.compare_digest(form.get("form", "").encode(), wanted.encode()):
            raise HttpError(403, "This form is too old: load the page again.")

    def _cookie(self, request: Request) -> str | None:
        """The value of the cookie, if it is valid."""
        token = self._gate.token
        if token is None:
            return None
        for pair in request.headers.get("cookie", "").split(";"):
            name, _, value = pair.strip().partition("=")
            if name != self._name or not (match := _VALUE.fullmatch(value)):
                continue
            wanted = _mac(token, f"visit {match[1]}")
            if hmac.compare_digest(match[2], wanted) and int(match[1]) > wall():
                return value
        return None

    @property
    def _name(self) -> str:
        token = self._gate.token
        return f"mcp_streams_{'' if token is None else _mac(token, 'name')[:8]}"


def form_of(request: Request) -> dict[str, str]:
    """The fields of a form. Raises `HttpError`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != _FORM:
        raise HttpError(415, f"Send a form, as {_FORM}.")
    try:
        fields = parse_qsl(request.body.decode(), keep_blank_values=True, max_num_fields=FIELDS_MAX)
    except ValueError:
        raise HttpError(400, "The form cannot be read.") from None
    return dict(fields)


_ATTRIBUTES: Final = "Path=/; HttpOnly; SameSite=Strict"


def _mac(token: Token, text: str) -> str:
    return hmac.new(token.derived(b"page"), text.encode(), hashlib.sha256).hexdigest()
