"""The security of the listeners: TLS, authentication, and the addresses they may listen at."""

import os
import re
import ssl
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec
import trio

from streams.auth.bearer import Authenticator, Verifier
from streams.auth.metadata import Metadata
from streams.errors import UnsafeFile
from streams.exchange import Admit, Endpoint, Head, Screen
from streams.logs import log
from streams.permissions import open_safe, real_path
from streams.process.addresses import is_host
from streams.process.options import Auth, CannotServe, Options
from transports.net.origins import names_loopback

if TYPE_CHECKING:
    from streams.auth.jwks import KeySet

_URL: Final = re.compile(r"https?://[!#-~]+")  # safe between quotes
# As browsers write it: RFC 6454, 6.2. Extensions of browsers have schemes of their own.
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[\w.-]+)(:[0-9]+)?", re.I | re.A)
PORT_MAX: Final = 65535
PORT_DIGITS_MAX: Final = 5  # Python reads no number of thousands of digits
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}


class Guard(msgspec.Struct, frozen=True):
    """TLS and authentication of all connections. Start `run` before the listeners."""

    tls: "Certificate | None" = None
    admit_http: Admit | None = None
    admit_ws: Admit | None = None
    metadata: Metadata | None = None
    keys: "KeySet | None" = None
    verifiers: Sequence[Verifier] = ()

    @property
    def s(self) -> str:
        """The suffix of the scheme of URLs: "s" with TLS."""
        return "" if self.tls is None else "s"

    def metadata_url(self, head: Head) -> str | None:
        """The URL at which the sender of this request reads how to get a token."""
        return None if self.metadata is None else self.metadata.url(head)

    def with_metadata(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint, together with the metadata document for clients without a token."""
        return endpoint if self.metadata is None else self.metadata.with_document(endpoint)

    def screening(self, screen: Screen) -> Screen:
        """The screen of `with_metadata`'s endpoint."""
        return screen if self.metadata is None else self.metadata.screening(screen)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the issuer's keys up to date until cancelled."""
        if self.keys is None:
            task_status.started()
        else:
            await self.keys.run(task_status=task_status)

    async def reload(self) -> None:
        """Read the certificate, the tokens and the keys again.

        If one of them cannot be used, the log says so.
        """
        if self.tls is not None:
            try:
                await trio.to_thread.run_sync(self.tls.reload)
            except CannotServe as error:
                log.error("the certificate in use stays", why=str(error))
            else:
                log.info("the certificate was read again")
        for verifier in self.verifiers:
            await verifier.reload()


def guard_for(options: Options, scopes: Callable[[], Sequence[str]] = tuple) -> Guard:
    """Make the guard that the options ask for.

    `scopes` returns those that the server's tools need; it is called after the server is loaded.
    Raises `CannotServe` if the options are impossible or unsafe.
    """
    auth = options.auth
    tls = None if options.tls_cert is None else Certificate(options.tls_cert, options.tls_key)
    _check_settings(options)
    for address in filter(None, (options.ws, options.http)):
        _check_address(address, options, is_tls=tls is not None)
    if not auth.is_required:
        return Guard(tls)
    keys = _keys(auth)
    verifiers = _verifiers(auth, keys)
    metadata = _metadata(options, scopes, is_tls=tls is not None)
    if metadata is None:
        admit = Authenticator(verifiers, scopes=scopes).admit
        return Guard(tls, admit, admit, None, keys, verifiers)
    known_url = metadata.known_url
    at_http = Authenticator(
        verifiers, is_public=metadata.covers, metadata_url=metadata.url, scopes=scopes
    )
    # Only --http serves the document.
    at_ws = Authenticator(verifiers, metadata_url=lambda _: known_url, scopes=scopes)
    return Guard(tls, at_http.admit, at_ws.admit, metadata, keys, verifiers)


def parse_address(address: str) -> tuple[str, int]:
    """`HOST:PORT` or `[HOST]:PORT` as a pair. Raises `CannotServe`."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not is_host(host) or not port.isdecimal() or "/" in address:
        raise CannotServe(f"{address}: write HOST:PORT, such as 127.0.0.1:8765.")
    if len(port) > PORT_DIGITS_MAX or int(port) > PORT_MAX:
        raise CannotServe(f"{address}: write HOST:PORT with a port of up to {PORT_MAX}.")
    return host, int(port)


def _check_address(address: str, options: Options, *, is_tls: bool) -> None:
    host, _ = parse_address(address)
    if names_loopback(host):
        return
    if not options.auth.is_required:
        if not options.insecure_anonymous:
            raise CannotServe(
                f"{address} can be reached from other machines and callers are not authenticated: "
                "bind to 127.0.0.1, or add --auth-tokens, --auth-jwks or --insecure-anonymous."
            )
    elif not (is_tls or options.auth.behind_proxy):
        raise CannotServe(
            f"{address} can be reached from other machines and tokens would be sent unencrypted: "
            "serve with --tls-cert, or with --behind-proxy if a proxy ends TLS."
        )


def _check_settings(options: Options) -> None:
    auth = options.auth
    if auth.is_required and options.insecure_anonymous:
        raise CannotServe("--insecure-anonymous: all callers are authenticated; leave it out.")
    if auth.is_required and not options.is_listening:
        raise CannotServe("--auth-tokens and --auth-jwks are for --ws and --http: add one of them.")
    if auth.auth_jwks is None and (auth.auth_issuer or auth.auth_audience):
        raise CannotServe("--auth-issuer and --auth-audience need --auth-jwks: the issuer's keys.")
    if auth.behind_proxy and auth.auth_resource is None:
        raise CannotServe(
            "--behind-proxy: clients know the server by the proxy's name: add --auth-resource with "
            "the URL that they use."
        )
    for origin in options.allowed_origins:
        _check_origin(origin)
    urls = (auth.auth_resource, *auth.auth_server)
    if wrong := [url for url in urls if url is not None and not _URL.fullmatch(url)]:
        raise CannotServe(f"{wrong[0]}: write a URL, such as https://mcp.example.com/mcp.")


def _check_origin(origin: str) -> None:
    """Raises `CannotServe` for an origin that no browser sends, or that many pages share."""
    if origin in ("*", "null"):
        raise CannotServe(
            f"--allow-origin {origin}: pages of strangers would be let in: name each origin."
        )
    scheme, _, place = origin.partition("://")
    port = _DEFAULT_PORTS.get(scheme.lower())
    if not _ORIGIN.fullmatch(origin) or (port is not None and place.endswith(port)):
        raise CannotServe(
            f"--allow-origin {origin}: write it as browsers do, such as https://app.example.com or "
            "http://localhost:3000, without a path and without the scheme's own port."
        )


class Certificate:
    """The certificate of the listeners, with its key.

    A call returns the TLS context for the next handshake. Existing connections keep theirs.
    """

    def __init__(self, certificate: Path, key: Path | None) -> None:
        """The key may be in the file of the certificate. Raises `CannotServe`."""
        self._certificate = certificate
        self._key = key
        self._context = self._load(None)

    def __call__(self) -> ssl.SSLContext:
        return self._context

    def reload(self) -> None:
        """Read the files again. If it raises `CannotServe`, the former certificate stays."""
        self._context = self._load(_no_passphrase)

    def _load(self, passphrase: Callable[[], str] | None) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            with ExitStack() as opened:
                certificate = _opened(opened, self._certificate, is_secret=self._key is None)
                key = _opened(opened, self._key or self._certificate, is_secret=True)
                context.load_cert_chain(certificate, key, passphrase)
        except UnsafeFile as error:
            raise CannotServe(f"{error}.") from error
        except (OSError, ValueError) as error:  # `ssl.SSLError` is an `OSError`
            files = f"{self._certificate} and {self._key}" if self._key else self._certificate
            raise CannotServe(f"{files} cannot be used for TLS: {error}.") from error
        return context


def _opened(opened: ExitStack, path: Path, *, is_secret: bool) -> str:
    """A path to the checked file itself, valid until `opened` is closed.

    It leads to the descriptor, so replacing the file after the check has no effect.
    """
    descriptor = open_safe(real_path(path), is_secret=is_secret)
    opened.callback(os.close, descriptor)
    return f"/dev/fd/{descriptor}"


def _no_passphrase() -> str:
    """Refuse to ask for a passphrase on the terminal, which would block the server."""
    raise ValueError("a key with a passphrase can be read only at the start")


# Each kind of token is imported only if it is used (PLC0415): the libraries for signatures and for
# fetching keys take as long to load as everything else.


def _verifiers(auth: Auth, keys: "KeySet | None") -> Sequence[Verifier]:
    verifiers: list[Verifier] = []
    if auth.auth_tokens is not None:
        from streams.auth.tokens import TokenFile, TokensUnusable  # noqa: PLC0415

        try:
            verifiers.append(TokenFile(auth.auth_tokens))
        except TokensUnusable as error:
            raise CannotServe(str(error)) from error
    if keys is not None:
        from streams.auth.jwt import JwtVerifier  # noqa: PLC0415

        issuer, audience = auth.auth_issuer, auth.auth_audience or auth.auth_resource
        if not issuer or not audience:
            raise CannotServe(
                "--auth-jwks needs --auth-issuer, whose keys these are, and --auth-audience, which "
                "tokens must be made for."
            )
        if not issuer.isprintable() or " " in issuer:
            raise CannotServe("--auth-issuer: write it as the tokens do, without blanks.")
        algorithms = [name.strip() for name in auth.auth_algorithms.split(",")]
        try:
            verifiers.append(
                JwtVerifier(keys, issuer=issuer, audience=audience, algorithms=algorithms)
            )
        except ValueError as error:
            raise CannotServe(f"--auth-algorithms: {error}.") from error
    return verifiers


def _keys(auth: Auth) -> "KeySet | None":
    if auth.auth_jwks is None:
        return None
    from streams.auth.jwks import KeySet, fetcher  # noqa: PLC0415

    parts = urlsplit(auth.auth_jwks)
    is_near = parts.scheme == "http" and names_loopback(parts.hostname or "")
    if "://" in auth.auth_jwks and parts.scheme != "https" and not is_near:
        raise CannotServe(f"--auth-jwks: {auth.auth_jwks} is not authenticated: use https.")
    try:
        return KeySet(fetcher(auth.auth_jwks), auth.auth_jwks)
    except UnsafeFile as error:
        raise CannotServe(f"{error}.") from error


def _metadata(
    options: Options, scopes: Callable[[], Sequence[str]], *, is_tls: bool
) -> Metadata | None:
    """The metadata document; None if there is no authorization server to name."""
    auth = options.auth
    issuers = [auth.auth_issuer] if auth.auth_issuer and _URL.fullmatch(auth.auth_issuer) else []
    servers = list(auth.auth_server) or issuers
    if not servers:
        return None
    scheme = "https" if is_tls or auth.behind_proxy else "http"
    return Metadata(options.http_path, servers, scheme, auth.auth_resource, scopes)
