"""The current keys of an issuer (a JWK Set, RFC 7517).

The key set is read again every few minutes. A token with an unknown key makes it read sooner, but
not more often than every `RETRY_S`, however many such tokens come. If the keys cannot be read, the
former ones stay, so that callers are served while the issuer cannot be reached. One thread at a
time reads them, with a deadline that no issuer can extend.
"""

import contextlib
import http.client
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from streams.logs import log
from streams.permissions import check_file, open_safe, real_path

REFRESH_S: Final = 300.0  # a withdrawn key may be accepted for this long
RETRY_S: Final = 15.0  # the shortest time between two reads
FETCH_S: Final = 10.0  # from the first connection to the last byte
KEYS_BYTES_MAX: Final = 256 * 1024
KEYS_MAX: Final = 100

Key = Mapping[str, Any]


class _KeySet(msgspec.Struct):
    keys: list[dict[str, Any]]


class KeySet:
    """The keys, which `run` reads in a task of its own."""

    def __init__(self, fetch: Callable[[], bytes], url: str = "") -> None:
        """`fetch` gives the JSON text of `url`, within `FETCH_S`. Raises `OSError`."""
        self._fetch = fetch
        self._url = url
        self._keys: list[Key] = []
        self._asked_at = -float("inf")
        self._reload_wanted = trio.Event()
        self._fetching = trio.Lock()
        # A host name that takes long to resolve keeps its thread: the next read waits for that.
        self._threads = trio.CapacityLimiter(1)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    @property
    def is_known(self) -> bool:
        """Whether the keys have been read at least once."""
        return bool(self._keys)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read the keys, and keep them up to date until cancelled."""
        await self._refresh()
        task_status.started()
        while True:
            with trio.move_on_after(REFRESH_S if self._keys else RETRY_S):
                await self._reload_wanted.wait()
                self._asked_at = -float("inf")
            self._reload_wanted = trio.Event()
            await self._refresh()

    async def find(self, kid: str, is_fit: Callable[[Key], bool]) -> Key | None:
        """The key with this id that `is_fit`; without an id, the only key that is; else None."""
        key = self._look(kid, is_fit)
        if key is None and self._is_due:
            await self._refresh()
            key = self._look(kid, is_fit)
        return key

    def _look(self, kid: str, is_fit: Callable[[Key], bool]) -> Key | None:
        fit = [key for key in self._keys if kid in ("", key.get("kid")) and is_fit(key)]
        return fit[0] if len(fit) == 1 else None

    @property
    def _is_due(self) -> bool:
        return trio.current_time() - self._asked_at >= RETRY_S

    def reload(self) -> None:
        """Make `run` read the keys now, even if they were read just before.

        If a read is under way, one more follows it, however often this is called.
        """
        self._reload_wanted.set()

    async def _refresh(self) -> None:
        async with self._fetching:
            if not self._is_due:
                return  # another task has read them meanwhile
            try:
                with trio.fail_after(FETCH_S):
                    text = await trio.to_thread.run_sync(
                        self._fetch, abandon_on_cancel=True, limiter=self._threads
                    )
                self._keys = _parse(text)
            except (
                OSError,
                ValueError,
                RecursionError,
                http.client.HTTPException,
                trio.TooSlowError,
            ) as error:
                why = str(error) or f"no answer within {FETCH_S:g} s"
                what = "the former ones stay" if self._keys else "no JWT is accepted until they are"
                log.error(f"the keys cannot be read; {what}", of=self._url, why=why[:200])
            self._asked_at = trio.current_time()


def _parse(text: bytes) -> list[Key]:
    """Raises `ValueError`."""
    if len(text) > KEYS_BYTES_MAX:
        raise ValueError(f"a key set of more than {KEYS_BYTES_MAX} bytes")
    keys = msgspec.json.decode(text, type=_KeySet).keys
    if not 0 < len(keys) <= KEYS_MAX:
        raise ValueError(f"a key set of {len(keys)} keys, where there must be 1 to {KEYS_MAX}")
    return list(keys)


def fetcher(where: str) -> Callable[[], bytes]:
    """A function that reads the keys from a URL or a file. Raises `UnsafeFile`."""
    if "://" in where:
        return partial(_download, where)
    check_file(real_path(Path(where)))
    return partial(_read, Path(where))


def _read(path: Path) -> bytes:
    with open(open_safe(real_path(path), is_secret=False), "rb") as file:
        return file.read(KEYS_BYTES_MAX + 1)


class _StayThere(urllib.request.HTTPRedirectHandler):
    """Makes a redirection an error: another host must not say which keys are valid."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _download(url: str) -> bytes:
    asked = urllib.request.Request(url, headers={"Accept": "application/json"})
    try:
        with (
            _deadline(FETCH_S) as connections,
            connections.opener().open(asked, timeout=FETCH_S) as answer,
        ):
            found: bytes = answer.read(KEYS_BYTES_MAX + 1)
    except urllib.error.HTTPError as error:
        error.close()  # the error is the response as well
        raise ConnectionError(f"{url}: HTTP {error.code}") from None
    return found


@contextlib.contextmanager
def _deadline(seconds: float) -> "Iterator[_Connections]":
    """Connections for urllib that are shut down after `seconds`. Raises `TimeoutError` then.

    The timeout of a socket starts anew with each byte, so it cannot limit an issuer that sends one
    byte now and then.
    """
    connections = _Connections()
    timer = threading.Timer(seconds, connections.shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield connections
    except (OSError, http.client.HTTPException) as error:
        if connections.are_late:
            raise TimeoutError(f"no answer within {seconds:g} s") from error
        raise
    finally:
        timer.cancel()
        connections.close()
    if connections.are_late:  # the body may be incomplete
        raise TimeoutError(f"no answer within {seconds:g} s")


class _Connections:
    """The connections of one request, each with a second descriptor: TLS takes over the first."""

    def __init__(self) -> None:
        self.are_late = False
        self._twins: list[socket.socket] = []
        self._lock = threading.Lock()

    def opener(self) -> urllib.request.OpenerDirector:
        return urllib.request.build_opener(_StayThere, _Http(self), _Https(self))

    def connect(self, *where: Any, **settings: Any) -> socket.socket:
        """Connect as `socket.create_connection` does."""
        connection = socket.create_connection(*where, **settings)
        with self._lock:
            self._twins.append(connection.dup())
        if self.are_late:
            self.shut_down()
        return connection

    def shut_down(self) -> None:
        """Shut down the connections: the thread that reads or writes gets an error."""
        self.are_late = True
        with self._lock:
            for twin in self._twins:
                with contextlib.suppress(OSError):  # the issuer has closed it
                    twin.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            for twin in self._twins:
                twin.close()
            self._twins.clear()


class _Http(urllib.request.HTTPHandler):
    def __init__(self, connections: _Connections) -> None:
        super().__init__()
        self._connections = connections

    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(self._connection, request)

    def _connection(self, host: str, **settings: Any) -> http.client.HTTPConnection:
        made = http.client.HTTPConnection(host, **settings)
        made._create_connection = self._connections.connect  # type: ignore[attr-defined]
        return made


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, connections: _Connections) -> None:
        super().__init__()
        self._connections = connections
        self._tls = ssl.create_default_context()

    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(self._connection, request)

    def _connection(self, host: str, **settings: Any) -> http.client.HTTPConnection:
        made = http.client.HTTPSConnection(host, context=self._tls, **settings)
        made._create_connection = self._connections.connect  # type: ignore[attr-defined]
        return made
