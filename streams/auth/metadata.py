"""Where a client learns who gives out tokens for this server: RFC 9728, as MCP asks for it.

"MCP servers MUST implement OAuth 2.0 Protected Resource Metadata." The document is at the path that
the endpoint's own is put behind, and at the root of the host, where a client looks that was sent to
neither.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import msgspec

from streams.exchange import Endpoint, Head, Request, Responder, Screen

WELL_KNOWN: Final = "/.well-known/oauth-protected-resource"
CACHED_S: Final = 300

_AUTHORITY: Final = re.compile(r"[A-Za-z0-9.:\[\]_-]{1,255}")  # fit to stand between quotes


class Metadata:
    """The document of one endpoint.

    `resource` is the URL that clients know the endpoint by; without it the one that a request was
    sent to, which only its own sender is told. `servers` are the authorization servers' URLs,
    `scopes` what the tools need.
    """

    def __init__(
        self,
        path: str,
        servers: list[str],
        scheme: str,
        resource: str | None,
        scopes: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._scopes = scopes
        self._servers = servers
        self._scheme = scheme
        self._resource = resource
        self._path = path
        self._paths = (WELL_KNOWN, WELL_KNOWN + path)

    def covers(self, head: Head) -> bool:
        """Whether the request is for the document, which anybody may read."""
        return head.method == "GET" and head.path in self._paths

    def url(self, head: Head) -> str | None:
        """Where the document is, for whoever has sent this request."""
        resource = self._resource_for(head)
        return None if resource is None else _well_known(resource)

    @property
    def known_url(self) -> str | None:
        """Where it is, without a request to tell."""
        return None if self._resource is None else _well_known(self._resource)

    def _resource_for(self, head: Head) -> str | None:
        authority = head.headers.get("host", "")
        if self._resource is not None or not _AUTHORITY.fullmatch(authority):
            return self._resource
        return f"{self._scheme}://{authority}{self._path}"

    def with_document(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint, with the document beside it."""

        async def answer(request: Request, responder: Responder) -> None:
            resource = self._resource_for(request)
            if resource is None or not self.covers(request):
                await endpoint(request, responder)
                return
            document: dict[str, Any] = {
                "resource": resource,
                "authorization_servers": self._servers,
                "bearer_methods_supported": ["header"],
            }
            if scopes := self._scopes():
                document["scopes_supported"] = scopes
            headers = (
                ("content-type", "application/json"),
                ("cache-control", f"max-age={CACHED_S}"),
                ("access-control-allow-origin", "*"),  # it is no secret, and tells of nobody
            )
            await responder.respond(200, headers, msgspec.json.encode(document))

        return answer

    def screening(self, screen: Screen) -> Screen:
        """The endpoint's screen. A request for the document has no body."""
        return lambda request: 0 if self.covers(request) else screen(request)


def _well_known(resource: str) -> str:
    """RFC 9728, 3.1: what is well known stands between the host and the path."""
    parts = urlsplit(resource)
    path = "" if parts.path == "/" else parts.path
    return urlunsplit((parts.scheme, parts.netloc, WELL_KNOWN + path, parts.query, ""))
