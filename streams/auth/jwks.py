"""The keys of an issuer (a JWK Set, RFC 7517), as they are now.

They are read again every few minutes, and for a token whose key is not among them, but no more than
once in a while however many such tokens come. Where they cannot be read, the former ones stay: an
issuer that is away for an hour turns nobody away. They are read in a thread.
"""

import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from streams.logs import log
from streams.permissions import check_file, open_safe, real_path

REFRESH_S: Final = 300.0  # so late a key may still be taken that was withdrawn
RETRY_S: Final = 15.0  # no sooner than that after the last time, whatever anybody asks for
FETCH_S: Final = 10.0
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
        self._fetching = trio.Lock()

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
            await trio.sleep(REFRESH_S if self._keys else RETRY_S)
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

    async def reload(self) -> None:
        """Read the keys now, whenever they were read last."""
        self._asked_at = -float("inf")
        await self._refresh()

    async def _refresh(self) -> None:
        async with self._fetching:
            if not self._is_due:
                return  # somebody else was faster
            try:
                with trio.fail_after(FETCH_S):
                    text = await trio.to_thread.run_sync(self._fetch, abandon_on_cancel=True)
                self._keys = _parse(text)
            except (OSError, ValueError, RecursionError, HTTPException, trio.TooSlowError) as error:
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
        with urllib.request.build_opener(_StayThere).open(asked, timeout=FETCH_S) as answer:
            found: bytes = answer.read(KEYS_BYTES_MAX + 1)
    except urllib.error.HTTPError as error:
        error.close()  # it is the response as well
        raise ConnectionError(f"{url}: HTTP {error.code}") from None
    return found
