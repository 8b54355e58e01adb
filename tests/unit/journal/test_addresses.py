"""URLs of stores are recognized, and shown without their secrets."""

from pathlib import Path

import pytest

from streams.journal.addresses import checked, checked_path, is_url, without_secrets
from streams.logs import redacted

SECRET = "hunter2"


@pytest.mark.parametrize(
    "url",
    [
        "redis://10.0.0.1:6379/0",
        "rediss://store.example/1",
        "valkey://store.example",
        "valkeys://[::1]:6380/0",
        "redis+sentinel://one:26379,two:26379/mymaster/0",
        "rediss+cluster://one:7000,two:7000",
        "REDIS://store.example",
    ],
)
def test_urls_of_stores_are_accepted(url: str) -> None:
    assert is_url(url)
    assert checked(url) == url
    assert without_secrets(url) == url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://:{SECRET}@store:6379/0", "redis://store:6379/0"),
        (f"rediss://app:{SECRET}@store/0", "rediss://store/0"),
        (f"redis://{SECRET}@store/0", "redis://store/0"),
        (f"redis://:{SECRET}/a@store/0", "redis://store/0"),  # an unescaped slash
        (f"redis://:{SECRET}@a@store/0", "redis://store/0"),  # an unescaped @
        (f"redis://:{SECRET}?a@store/0", "redis://store/0"),
        (f"redis://:{SECRET}#a@store/0", "redis://store/0"),
        (f"redis://store/0?password={SECRET}&prefix=calls", "redis://store/0?prefix=calls"),
        (f"redis+sentinel://:{SECRET}@one:1,two:2/main", "redis+sentinel://one:1,two:2/main"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert without_secrets(url) == shown
    assert SECRET not in redacted(None, "", f"cannot reach {url}: refused") or "?password" in url


@pytest.mark.parametrize(
    "url",
    [f"http://:{SECRET}@store", f"redi://{SECRET}@store", f"redis://:{SECRET}@", "redis:///0"],
)
def test_other_urls_are_refused_without_their_secrets(url: str) -> None:
    with pytest.raises(ValueError, match="://") as refused:
        checked(url)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "name",
    ["127.0.0.1:16379", "store:6379", "store.example:6379/0", "redis:/host", "valkeys:/:hunter2@h"],
)
def test_an_address_without_its_scheme_is_no_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="write redis://HOST:PORT/0") as refused:
        checked_path(name)
    assert SECRET not in str(refused.value)
    if "/" not in name:
        Path(name).touch()
        assert checked_path(name) == Path(name), "it exists"
    assert checked_path(f"./{name}") == Path(name)


@pytest.mark.parametrize("path", ["a.db", "redis", "redis:journal", "a:b/c", "C:/a.db", "day:1.db"])
def test_other_names_are_those_of_files(path: str) -> None:
    assert checked_path(path) == Path(path)


@pytest.mark.parametrize("path", ["journal.db", "/var/lib/a.db", "redis", "redis:journal", "a:b/c"])
def test_a_path_is_no_url(path: str) -> None:
    assert not is_url(path)
