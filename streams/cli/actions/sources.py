"""Where the operator's commands read: a server, a file that no server serves, or a store.

A journal's file leads to the server that owns it, over the socket beside it. Without an owner, and
in a store, the journal itself is read, and nothing is changed.
"""

import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urlsplit

from streams.admin.tokens import TokenUnusable, path_for, read_token
from streams.cli.actions.admin_client import TOKEN_VARIABLE, UNIX, AdminClient, CannotAsk, is_socket
from streams.cli.operator_options import Where
from streams.errors import JournalError
from streams.journal.addresses import is_url, without_secrets
from streams.journal.ownership import operators_path, owner_of
from streams.journal.sqlite.snapshot import open_snapshot
from streams.limits import Limits
from streams.observe.details import CallDetail, Details, MessagesFound
from streams.observe.registry import NoSuchCall, Page, Registry, Wanted
from streams.process import state
from streams.server.storage import Place, open_store

HTTP: Final = ("http://", "https://", UNIX)
SERVERS_SHOWN: Final = 20


class CannotLook(Exception):
    """The place cannot be looked at. The message says what to do."""


class Source(Protocol):
    """Calls, wherever they are read. All methods raise `CannotAsk`, or `CannotLook`."""

    @property
    def name(self) -> str:
        """The journal or the address, without secrets."""

    @property
    def client(self) -> AdminClient | None:
        """Of a server, which may be changed too; None for a journal."""

    @property
    def path(self) -> Path | None:
        """The journal's file, if it was found by that: see `source_now`."""

    def held(self) -> AbstractAsyncContextManager[None]:
        """Open a journal once for all that the block reads, as it is when the block begins.

        To open a file takes time for each stream in it, so not each page of a list does that.
        """

    async def calls(self, before: int | None, limit: int, wanted: Wanted) -> Page:
        """See `Registry.calls`."""

    async def call(self, prefix: str) -> CallDetail:
        """See `Details.call`."""

    async def messages(self, prefix: str, after: int, limit: int) -> MessagesFound:
        """See `Details.messages`."""


class _Server:
    def __init__(self, client: AdminClient, name: str, path: Path | None = None) -> None:
        self.client, self.name, self.path = client, name, path

    def held(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def calls(self, before: int | None, limit: int, wanted: Wanted) -> Page:
        page: Page = await self.client.get(
            "calls",
            kind=Page,
            before=before,
            limit=limit,
            state=",".join(sorted(wanted.states)),
            text=wanted.text,
        )
        return page

    async def call(self, prefix: str) -> CallDetail:
        found: CallDetail = await self.client.get("calls", prefix, kind=CallDetail)
        return found

    async def messages(self, prefix: str, after: int, limit: int) -> MessagesFound:
        found: MessagesFound = await self.client.get(
            "calls", prefix, "messages", kind=MessagesFound, after=after, limit=limit
        )
        return found


class _Journal:
    """A journal that is read by this process. `_opened` opens it for each look, or for `held`."""

    name: str
    client: AdminClient | None = None
    path: Path | None = None
    _held: Registry | None = None

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Registry]:
        raise NotImplementedError
        yield  # which makes it a generator

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        with _told():
            async with self._opened() as registry:
                self._held = registry
                try:
                    yield
                finally:
                    self._held = None

    @asynccontextmanager
    async def _read(self) -> AsyncIterator[Registry]:
        if self._held is not None:
            yield self._held
            return
        async with self._opened() as registry:
            yield registry

    async def calls(self, before: int | None, limit: int, wanted: Wanted) -> Page:
        with _told():
            async with self._read() as registry:
                return await registry.calls(before=before, limit=limit, wanted=wanted)

    async def call(self, prefix: str) -> CallDetail:
        with _told():
            async with self._read() as registry:
                return await Details(registry).call(prefix)

    async def messages(self, prefix: str, after: int, limit: int) -> MessagesFound:
        with _told():
            async with self._read() as registry:
                return await Details(registry).messages(prefix, after, limit=limit)


class _File(_Journal):
    def __init__(self, path: Path) -> None:
        self._path = self.path = path
        self.name = str(path)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Registry]:
        is_served = owner_of(self._path) is not None
        with open_snapshot(self._path) as snapshot:
            yield Registry(snapshot, is_served=is_served)


class _Store(_Journal):
    def __init__(self, url: str) -> None:
        self._url = url
        self.name = without_secrets(url)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Registry]:
        place = Place(journal=self._url)
        async with open_store(place, Limits(), only_existing=True) as store:
            yield Registry(store, is_served=False)  # calls that run have an owner there


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except NoSuchCall as error:
        raise CannotAsk(str(error), status=404) from None  # as a server answers
    except PermissionError as error:
        raise CannotLook(_not_yours(Path(error.filename))) from None
    except (JournalError, OSError) as error:
        raise CannotLook(str(error)) from None


def source_of(where: Where) -> Source:
    """The source that the user means. Raises `CannotLook`."""
    with _told():
        return _source_of(where)


def _source_of(where: Where) -> Source:
    if where.admin is not None:
        return _Server(_client(where.admin, where.token_file), where.admin)
    name = where.journal
    if name is None:
        return _only_server()
    if name.startswith(HTTP):
        return _Server(_client(name, where.token_file), name)
    if is_url(name):
        return _Store(name)
    return _of_file(_file_named(name))


def _of_file(path: Path) -> Source:
    sockets = operators_path(path)
    if sockets.is_socket() and not is_socket(sockets):
        raise CannotLook(_not_yours(path))  # a server may run, so "no server" could be untrue
    if is_socket(sockets) and _is_owned(path):
        return _Server(AdminClient(f"{UNIX}{sockets}"), str(path), path)
    return _File(path)


def _not_yours(path: Path) -> str:
    """The advice where only another user may look."""
    try:
        user = path.owner()
    except (KeyError, OSError):
        user = "USER"
    return f"{path}: another user owns it: run this as that user, with sudo -u {user}."


def source_now(source: Source) -> Source:
    """The same place now: a file may have another owner meanwhile, or none."""
    with _told():
        return source if source.path is None else _of_file(source.path)


def _is_owned(path: Path) -> bool:
    try:
        return owner_of(path) is not None
    except OSError as error:
        raise CannotLook(f"{path}: {error}.") from None


def _file_named(name: str) -> Path:
    """The journal at a path, or the only one with this name in the user's folder of state."""
    path = Path(name)
    if path.exists() or "/" in name:
        return path
    found = [each for each in _kept() if each.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise CannotLook(f"Several journals have names like that: {_list(found)}")
    if re.fullmatch(r"[^/]+:\d+", name):
        raise CannotLook(
            f"{name}: there is no such file. If it is a server's --admin: http://{name}."
        )
    raise CannotLook(f"{name}: there is no such file, and no journal of yours has such a name.")


def _kept() -> list[Path]:
    """The journals, and the side files' names of stores, in the user's folder of state."""
    try:
        folder = state.folder()
        return sorted(each for each in folder.iterdir() if each.suffix in (".db", ".store"))
    except (OSError, RuntimeError):
        return []  # there is no such folder yet


def _only_server() -> Source:
    running = [each for each in _kept() if is_socket(operators_path(each))]
    running = [each for each in running if _is_owned(each)]
    if len(running) == 1:
        return _of_file(running[0])
    if running:
        raise CannotLook(f"Several servers of yours run. Name a journal: {_list(running)}")
    raise CannotLook(
        "No server that `wrap` or `attach` has started runs. Name the address of a server's "
        "--admin, or a journal: its file, or the URL of its store."
    )


def _list(paths: list[Path]) -> str:
    shown = ", ".join(str(each) for each in paths[:SERVERS_SHOWN])
    return shown + (" …" if len(paths) > SERVERS_SHOWN else ".")


def _client(address: str, token_file: Path | None) -> AdminClient:
    try:
        return AdminClient(address, _token(address, token_file))
    except (ValueError, TokenUnusable) as error:
        raise CannotLook(str(error)) from None


def _token(address: str, file: Path | None) -> str | None:
    """The operator's token: of the file, of the environment, or the one kept for this address."""
    given = os.environ.get(TOKEN_VARIABLE)
    if file is not None:
        return read_token(file)
    if given is not None:
        return given.strip()
    try:
        kept = path_for(state.folder(), _place(address))
    except (OSError, RuntimeError):
        return None
    return read_token(kept, follows_links=False) if os.path.lexists(kept) else None


def _place(address: str) -> str:
    """The address as the server names the file of its token by it."""
    if address.startswith(UNIX):
        return os.path.abspath(address.removeprefix(UNIX))
    parts = urlsplit(address if "://" in address else f"//{address}")
    if parts.hostname != "localhost":
        return parts.netloc
    return "127.0.0.1" if parts.port is None else f"127.0.0.1:{parts.port}"
