"""The operator's commands find a server with its token, and read a journal that none serves."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streams.admin.tokens import kept_token, path_for
from streams.cli.actions import operators, sources
from streams.cli.actions.sources import TOKEN_VARIABLE, CannotLook, source_of
from streams.cli.operator_options import Where
from streams.journal.records import Create
from streams.journal.sqlite import open_sqlite_journal
from streams.journal.sqlite.snapshot import Snapshot, open_snapshot
from streams.observe.registry import SCANNED_MAX, Wanted
from streams.process import state
from tests.rigs.journals import applied, record


class Client:
    """A client that keeps the token that it is given."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.token = token


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setattr(sources, "AdminClient", Client)
    return state.folder()


def token_for(address: str) -> str | None:
    client = source_of(Where(admin=address)).client
    assert isinstance(client, Client)
    return client.token


@pytest.mark.parametrize(
    ("address", "bound"),
    [
        ("http://localhost:9090", "127.0.0.1:9090"),
        ("http://LOCALHOST:9090/", "127.0.0.1:9090"),
        ("http://127.0.0.1:9090/api", "127.0.0.1:9090"),
        ("http://[::1]:9090", "[::1]:9090"),
        ("http://mylocalhost.example:9090", "mylocalhost.example:9090"),
        ("http://localhost.example:9090", "localhost.example:9090"),
        ("unix:/run/localhost.sock", "/run/localhost.sock"),
    ],
)
def test_the_kept_token_is_found_for_each_name_of_an_address(
    folder: Path, address: str, bound: str
) -> None:
    assert token_for(address) is None
    assert kept_token(path_for(folder, bound)) == token_for(address)


def test_a_token_of_the_environment_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, " a-token-of-an-operator\n")
    for _ in range(2):
        assert token_for("http://localhost:9090") == "a-token-of-an-operator"


@pytest.mark.parametrize("address", ["http://localhost:many", "http://[::1"])
def test_an_address_that_is_none_is_told(address: str) -> None:
    with pytest.raises(CannotLook):
        source_of(Where(admin=address))


def test_a_journal_with_too_long_a_name_is_told() -> None:
    for name in ("x" * 250, "x" * 5_000):
        with pytest.raises(CannotLook):
            source_of(Where(journal=name))


async def test_a_long_list_opens_a_journal_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To open one takes time for each call in it."""
    path = tmp_path / "journal.db"
    calls = 2 * SCANNED_MAX + 1
    async with open_sqlite_journal(path, durability="process") as journal:
        await applied(journal, *(Create(record(f"s{n}", number=n + 1)) for n in range(calls)))
    opened: list[Path] = []

    @contextmanager
    def counted(path: Path) -> Iterator[Snapshot]:
        opened.append(path)
        with open_snapshot(path) as snapshot:
            yield snapshot

    monkeypatch.setattr(sources, "open_snapshot", counted)
    source = source_of(Where(journal=str(path)))
    page = await operators.calls_of(source, Wanted(text="nowhere"), 50)
    assert (page.calls, page.before, len(opened)) == ((), None, 1)
    assert (await operators._counted(source))["stopped"] == calls
    assert len(opened) == 2
