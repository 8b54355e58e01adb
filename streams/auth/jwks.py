"""The keys of an issuer (a JWK Set, RFC 7517), as they are now.

They are read again every few minutes, and for a token whose key is not among them, but no more than
once in a while however many such tokens come. Where they cannot be read, the former ones stay: an
issuer that cannot be reached for an hour turns no caller away. They are read in a thread, one at a
time, which ends in time whatever the issuer does.
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

REFRESH_S: Final = 300.0  # so late a key may still be taken that was withdrawn
RETRY_S: Final = 15.0  # no sooner than that after the last time, whatever anybody asks for
FETCH_S: Final = 10.0  # for the whole of it: from the first connection to the last byte
KEYS_BYTES_MAX: Final = 256 * 1024
KEYS_MAX: Final = 100

Key = Mapping[str, Any]


class _KeySet(msgspec.Struct):
    keys: list[dict[str, Any]]


class KeySet:
    """`run` it in a task of its own, which reads it for the first time."""

    def __init__(self, fetch: Callable[[], bytes]) -> None:
        """`fetch` gives the JSON text, within `FETCH_S`. Raises `OSError`."""
        self._fetch = fetch
        self._keys: list[Key] = []
        self._asked_at = -float("inf")
        self._reload_wanted = trio.Event()
        self._fetching = trio.Lock()
        # A name that takes long to resolve keeps its thread for so long: the next one waits for it.
        self._threads = trio.CapacityLimiter(1)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    @property
    def is_known(self) -> bool:
        """Whether the keys could be read at all, so far."""
        return bool(self._keys)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read the keys, and again for ever."""
        await self._refresh()
        task_status.started()
        while True:
            with trio.move_on_after(REFRESH_S if self._keys else RETRY_S):
                await self._reload_wanted.wait()
                self._asked_at = -float("inf")
            self._reload_wanted = trio.Event()
            await self._refresh()

    async def find(self, kid: str, is_fit: Callable[[Key], bool]) -> Key | None:
        """The key of this name that is fit; of no name, the only one that is."""
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
        """Have `run` read the keys now, whenever they were read last.

        While they are being read they are read once more after that, however often this is called.
        """
        self._reload_wanted.set()

    async def _refresh(self) -> None:
        async with self._fetching:
            if not self._is_due:
                return  # somebody else was faster
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
                log.error("the keys cannot be read; the former ones stay", why=why[:200])
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
    """A function that reads the keys at a URL, or in a file. Raises `UnsafeFile`."""
    if "://" in where:
        return partial(_download, where)
    check_file(real_path(Path(where)))
    return partial(_read, Path(where))


def _read(path: Path) -> bytes:
    with open(open_safe(real_path(path), is_secret=False), "rb") as file:
        return file.read(KEYS_BYTES_MAX + 1)


class _StayThere(urllib.request.HTTPRedirectHandler):
    """Who may sign is not for another host to say: a redirection is an error."""

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
        error.close()  # it is the response as well
        raise ConnectionError(f"{url}: HTTP {error.code}") from None
    return found


@contextlib.contextmanager
def _deadline(seconds: float) -> "Iterator[_Connections]":
    """Connections of urllib's that are shut down after `seconds`. Raises `TimeoutError` then.

    The timeout of a socket starts anew with each byte, so that alone an issuer that drips is waited
    for without end.
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
    if connections.are_late:  # what ended may be the half of a body
        raise TimeoutError(f"no answer within {seconds:g} s")


class _Connections:
    """The connections that one request takes, with a second descriptor of each: TLS takes the first
    one over.
    """

    def __init__(self) -> None:
        self.are_late = False
        self._twins: list[socket.socket] = []
        self._lock = threading.Lock()

    def opener(self) -> urllib.request.OpenerDirector:
        return urllib.request.build_opener(_StayThere, _Http(self), _Https(self))

    def connect(self, *where: Any, **settings: Any) -> socket.socket:
        """As `socket.create_connection`."""
        connection = socket.create_connection(*where, **settings)
        with self._lock:
            self._twins.append(connection.dup())
        if self.are_late:
            self.shut_down()
        return connection

    def shut_down(self) -> None:
        """End the connections: the thread that reads or writes gets an error."""
        self.are_late = True
        with self._lock:
            for twin in self._twins:
                with contextlib.suppress(OSError):  # the issuer was faster
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
