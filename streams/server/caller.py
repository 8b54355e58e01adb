"""The caller of a tool: its identity and its client, as the call sees them.

Both are those of the caller that made the call. They stay the same when the call is resumed over
another connection, and the journal keeps them for a call that may be restarted.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from streams.engine.connection import Connection, Session
from streams.exchange import NO_CLAIMS, Caller, Scopes, claims_of, is_anonymous
from streams.logs import log
from streams.protocol.clients import ClientInfo

_UNKNOWN_CLIENT: Final = ClientInfo()


class Principal(msgspec.Struct, frozen=True):
    """The identity of a caller, as the server knows it.

    | caller | `issuer` | `subject` | `scopes` | `claims` |
    |---|---|---|---|---|
    | with a JWT | the token's issuer | its subject | those of the token | all of the token |
    | with a token of this server | `tokens` | the token's name | those of the token | empty |
    | a user of this machine, over stdio | `os` | the user's id | None: needs none | empty |
    | anonymous | None | None | empty | empty |
    """

    name: str  # unique: `bearer(issuer, subject)`, `os(1000)`; of one session if anonymous
    issuer: str | None = None
    subject: str | None = None
    scopes: frozenset[str] | None = frozenset()
    claims: Mapping[str, Any] = NO_CLAIMS

    @property
    def is_anonymous(self) -> bool:
        """Whether the caller was not authenticated."""
        return is_anonymous(self.name)


class _Kept(msgspec.Struct):
    """The caller of a call that may be restarted, as the journal keeps it."""

    scopes: frozenset[str] | None
    claims: str  # JSON, by `json`: its numbers may be of any size
    client: ClientInfo | None
    trace: str = ""  # the `traceparent` of the call's first span, if it is traced


class CallerInfo(msgspec.Struct, frozen=True):
    """The caller that made a call."""

    name: str  # of its principal
    scopes: Scopes
    claims: Mapping[str, Any]
    client_known: ClientInfo | None  # None if it is unknown

    @classmethod
    def of(cls, connection: Connection) -> "CallerInfo":
        """The caller at the other end of a connection."""
        channel, session = connection.channel, connection.session
        return cls(session.principal, channel.scopes, claims_of(channel), session.client)

    @classmethod
    def of_message(cls, session: Session, caller: Caller | None) -> "CallerInfo":
        """The caller that has sent one message over HTTP."""
        if caller is None:
            return cls(session.principal, frozenset(), NO_CLAIMS, session.client)
        return cls(session.principal, caller.scopes, caller.claims, session.client)

    @property
    def client(self) -> ClientInfo:
        """Its client, as that has declared itself."""
        return self.client_known or _UNKNOWN_CLIENT

    @property
    def principal(self) -> Principal:
        """Its identity."""
        issuer, subject = _parts(self.name)
        return Principal(self.name, issuer, subject, self.scopes, self.claims)

    def kept(self) -> bytes:
        """The caller as the journal keeps it."""
        claims = json.dumps(dict(self.claims), default=str)  # the author may have made them
        return msgspec.msgpack.encode(_Kept(self.scopes, claims, self.client_known))

    @classmethod
    def kept_as(cls, name: str, kept: bytes) -> "CallerInfo":
        """The caller of a restarted call. An older version has kept nothing but the name."""
        if kept:
            try:
                found = msgspec.msgpack.decode(kept, type=_Kept)
                return cls(name, found.scopes, json.loads(found.claims), found.client)
            except ValueError as error:
                log.warning("the caller of a restarted call cannot be read", why=str(error))
        return cls(name, None if name.startswith("os(") else frozenset(), NO_CLAIMS, None)


def with_trace(kept: bytes, traceparent: str) -> bytes:
    """A caller as the journal keeps it, with the context of the span of its call."""
    found = msgspec.msgpack.decode(kept, type=_Kept)
    return msgspec.msgpack.encode(msgspec.structs.replace(found, trace=traceparent))


def trace_in(kept: bytes) -> str:
    """The `traceparent` that was kept with a caller; "" without one."""
    try:
        return msgspec.msgpack.decode(kept, type=_Kept).trace if kept else ""
    except ValueError:
        return ""  # `kept_as` tells what cannot be read


def _parts(name: str) -> tuple[str | None, str | None]:
    """The issuer and the subject of a principal."""
    if is_anonymous(name):
        return None, None
    kind, opened, inner = name.partition("(")
    if opened and inner.endswith(")"):
        inner = inner[:-1]
        if kind == "os":
            return "os", inner
        if kind == "bearer":
            issuer, _, subject = inner.partition(", ")
            return issuer, subject
    return None, name  # the author authenticates callers
