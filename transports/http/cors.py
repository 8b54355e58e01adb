"""CORS: the headers by which a browser lets a web page of another origin be a client.

The rules are those of the Fetch standard (https://fetch.spec.whatwg.org, "HTTP CORS protocol").
Only origins that the operator has named get these headers: pages of loopback may send requests to
loopback, but a browser shows them no response until they are named too. Cookies are never used, so
no response has `Access-Control-Allow-Credentials`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from streams.exchange import Head, Headers

ALLOW_ORIGIN: Final = "Access-Control-Allow-Origin"

METHODS: Final = "POST, GET, DELETE"
# The headers that clients of MCP send. `*` would not cover Authorization.
ASKED: Final = (
    "Accept, Authorization, Content-Type, Last-Event-ID, Mcp-Method, Mcp-Name, "
    "Mcp-Protocol-Version, Mcp-Session-Id"
)
# The headers of responses that a client reads. Without this list, a page sees hardly any.
TOLD: Final = "Allow, Mcp-Session-Id, Retry-After, WWW-Authenticate"
# For how long a browser need not ask again: the most that Chromium accepts.
MAX_AGE_S: Final = 7200

# The response depends on the origin, so that a cache must not give it to another one.
_VARY: Final = ("Vary", "Origin")
# Of the response to a preflight, besides those of `cors_headers`.
PREFLIGHT: Final = (
    ("Access-Control-Allow-Methods", METHODS),
    ("Access-Control-Allow-Headers", ASKED),
    ("Access-Control-Max-Age", str(MAX_AGE_S)),
)


def is_preflight(head: Head, allowed: Collection[str]) -> bool:
    """Whether a browser asks with this request if a page of an allowed origin may send another."""
    return (
        head.method == "OPTIONS"
        and "access-control-request-method" in head.headers
        and head.headers.get("origin", "").lower() in allowed
    )


def cors_headers(fields: Mapping[str, Sequence[str]], allowed: Collection[str]) -> Headers:
    """The headers of any response to a request with these header fields.

    `allowed` are the origins that the operator has named, in lower case.
    """
    if not allowed:
        return ()
    origins = fields.get("origin", ())
    if len(origins) != 1 or origins[0].lower() not in allowed:
        return (_VARY,)
    return (_VARY, (ALLOW_ORIGIN, origins[0]), ("Access-Control-Expose-Headers", TOLD))
