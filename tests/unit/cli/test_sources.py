"""The operator's commands find the token that a server of this user has kept for its address."""

from pathlib import Path

import pytest

from streams.admin.tokens import kept_token, path_for
from streams.cli.actions import sources
from streams.cli.actions.sources import TOKEN_VARIABLE, CannotLook, source_of
from streams.cli.operator_options import Where
from streams.process import state


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
