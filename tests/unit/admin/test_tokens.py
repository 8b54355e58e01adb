"""The operator's token is made once, and kept for its user alone."""

from pathlib import Path

import pytest

from streams.admin.tokens import TokenUnusable, kept_token, path_for, read_token


def test_a_token_is_made_once(tmp_path: Path) -> None:
    file = path_for(tmp_path, "127.0.0.1:9090")
    token = kept_token(file)
    assert kept_token(file) == read_token(file) == token
    assert len(token) > 40
    assert file.stat().st_mode & 0o777 == 0o600


def test_each_address_has_its_own(tmp_path: Path) -> None:
    places = ("127.0.0.1:9090", "127.0.0.1:9091", "[::1]:9090", "/run/a/admin.sock")
    files = [path_for(tmp_path, each) for each in places]
    assert len(set(files)) == 4
    assert {each.parent for each in files} == {tmp_path}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has no token"),
        (b"two words of it all", "has no token"),
        (b"short", "too short"),
        (b"x" * 5000, "has no token"),
        (b"\xff" * 40, "has no token"),
    ],
)
def test_what_is_no_token_is_refused(content: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(TokenUnusable, match=says):
        read_token(file)


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o644)
    with pytest.raises(TokenUnusable, match="chmod"):
        read_token(file)
    file.chmod(0o600)
    assert read_token(file) == "0123456789abcdef"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenUnusable, match="nowhere cannot be read"):
        read_token(tmp_path / "nowhere")
