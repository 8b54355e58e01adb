"""Tokens in a file: made, taken, revoked, and what is refused of the file itself."""

import os
import stat
import threading
from pathlib import Path

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from streams.auth.bearer import RECHECK_S, InvalidToken
from streams.auth.tokens import TokenFile, TokensUnusable, add, read, revoke

NOW = 2_000_000_000.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.jsonl"


async def test_a_token_is_its_name_to_the_server(path: Path) -> None:
    secret, _ = add(path, "laptop")
    tokens = TokenFile(path)
    assert secret.startswith("mcps_")
    assert len(secret) >= len("mcps_") + 43  # 256 bits in base64
    assert tokens.recognizes(secret)
    assert (await tokens.verify(secret)).principal == "bearer(tokens, laptop)"


async def test_the_file_has_no_token(path: Path) -> None:
    secret, token = add(path, "laptop", 3600.0)
    content = path.read_text()
    assert secret not in content
    assert secret.removeprefix("mcps_")[:16] not in content
    assert token.sha256 in content


def test_the_file_is_its_owners_alone_whatever_the_umask(path: Path) -> None:
    before = os.umask(0)
    try:
        add(path, "laptop")
        add(path, "phone")
        revoke(path, "phone")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("letters", ["mcps_", "mcps_" + "A" * 43, "mcps_ü"])
async def test_a_token_that_was_never_made_is_not_taken(path: Path, letters: str) -> None:
    add(path, "laptop")
    with pytest.raises(InvalidToken):
        await TokenFile(path).verify(letters)


async def test_what_is_added_and_revoked_counts_at_once(path: Path) -> None:
    first, _ = add(path, "laptop")
    tokens = TokenFile(path)
    second, token = add(path, "laptop")
    caller = await tokens.verify(second)
    assert caller.principal == (await tokens.verify(first)).principal
    assert [each.id for each in revoke(path, token.id)] == [token.id]
    assert caller.holds_for_s() <= 0
    with pytest.raises(InvalidToken):
        await tokens.verify(second)
    assert (await tokens.verify(first)).holds_for_s() == RECHECK_S
    assert len(revoke(path, "laptop")) == 1
    with pytest.raises(InvalidToken):
        await tokens.verify(first)


async def test_a_token_has_the_scopes_that_it_was_given(path: Path) -> None:
    plain, _ = add(path, "laptop")
    scoped, token = add(path, "laptop", scopes=["reports.read", "reports.write", "reports.read"])
    tokens = TokenFile(path)
    assert token.scopes == ("reports.read", "reports.write")
    assert (await tokens.verify(scoped)).scopes == {"reports.read", "reports.write"}
    assert (await tokens.verify(plain)).scopes == frozenset()
    first, second = path.read_text().splitlines()
    assert "scopes" not in first, "a version without them can read it"
    caller = await tokens.verify(scoped)
    path.write_text(f"{first}\n{second.replace('reports.write', 'reports.none')}\n")
    assert caller.holds_for_s() <= 0, "what it was let in with is no longer so"
    assert (await tokens.verify(scoped)).scopes == {"reports.read", "reports.none"}


@pytest.mark.parametrize("scope", ["", "a b", 'a"b', "a\\b", "ä", "x" * 256, "a\n"])
def test_what_is_no_scope_makes_no_token(path: Path, scope: str) -> None:
    with pytest.raises(ValueError, match="scope"):
        add(path, "laptop", scopes=[scope])
    assert not path.exists()


def test_to_revoke_what_is_not_there_changes_nothing(path: Path) -> None:
    add(path, "laptop")
    before = path.stat()
    assert revoke(path, "phone") == []
    assert path.stat() == before
    with pytest.raises(FileNotFoundError):
        revoke(path.with_name("none"), "laptop")
    assert not path.with_name("none").exists()


async def test_a_token_expires(path: Path, autojump_clock: trio.testing.MockClock) -> None:
    secret, token = add(path, "laptop", 3600.0)
    start = trio.current_time()
    tokens = TokenFile(path, clock=lambda: token.created_at + trio.current_time() - start)
    caller = await tokens.verify(secret)
    assert caller.holds_for_s() == RECHECK_S
    await trio.sleep(3590)
    assert 9 <= caller.holds_for_s() <= 10
    await trio.sleep(10)
    assert caller.holds_for_s() <= 0
    with pytest.raises(InvalidToken):
        await tokens.verify(secret)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"not json\n", "does not hold tokens"),
        (b'{"name": "a"}\n', "does not hold tokens"),
        (b'{"name": "a", "sha256": "mcps_x", "created_at": 1}\n', "the name or the hash"),
        (b'{"name": "a, b)", "sha256": "' + b"0" * 64 + b'", "created_at": 1}\n', "the name"),
        (b"\n" * 5_000_000, "too long"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(path: Path, content: bytes, why: str) -> None:
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(TokensUnusable, match=why):
        TokenFile(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o622])
def test_a_file_that_others_may_use_is_refused(path: Path, mode: int) -> None:
    add(path, "laptop")
    path.chmod(mode)
    with pytest.raises(TokensUnusable, match="chmod 600"):
        TokenFile(path)
    with pytest.raises(TokensUnusable, match="chmod 600"):
        add(path, "phone")


def test_no_file_is_no_way_in(path: Path) -> None:
    with pytest.raises(TokensUnusable, match="cannot be read"):
        TokenFile(path)


async def test_a_file_that_becomes_unusable_lets_nobody_in_until_it_is_mended(path: Path) -> None:
    secret, _ = add(path, "laptop")
    tokens = TokenFile(path)
    path.chmod(0o644)
    with capture_logs() as logs:
        for _ in range(3):
            with pytest.raises(InvalidToken):
                await tokens.verify(secret)
    assert [entry["log_level"] for entry in logs] == ["error"], "said once"
    path.chmod(0o600)
    assert (await tokens.verify(secret)).holds_for_s() > 0


@pytest.mark.parametrize("name", ["", " ", "a b", "a)", "é", "-x", "x" * 65, "0123abcd"])
def test_what_is_no_name_is_refused(path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no name for a token"):
        add(path, name)
    assert not path.exists()


def test_tokens_that_are_made_at_once_are_all_kept(path: Path) -> None:
    def make(number: int) -> None:
        add(path, f"name-{number}")
        if number % 2:
            revoke(path, f"name-{number}")

    makers = [threading.Thread(target=make, args=[number]) for number in range(16)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert {token.name for token in read(path)} == {f"name-{n}" for n in range(0, 16, 2)}
