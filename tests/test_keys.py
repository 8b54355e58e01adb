"""Tokens open one stream, for as long as their key is known, and keys are nobody else's."""

import base64
import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streams.errors import JournalUnusable
from streams.keys import Keyring, new_id, new_request_id

ANY_TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates too


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.key"


def key_line(byte: int) -> bytes:
    return base64.urlsafe_b64encode(bytes([byte]) * 32) + b"\n"


def write_keys(path: Path, content: bytes, mode: int = 0o600) -> None:
    path.write_bytes(content)
    path.chmod(mode)


def test_a_token_is_of_its_stream_and_of_no_other() -> None:
    keyring = Keyring.load(None)
    one, other = new_id(), new_id()
    assert keyring.is_token_of(one, keyring.token(one))
    assert not keyring.is_token_of(other, keyring.token(one))
    assert not Keyring.load(None).is_token_of(one, keyring.token(one))


def test_a_token_is_the_keyed_hash_of_the_stream_id() -> None:
    # RFC 4231 has no 32-byte key; this one was worked out with `openssl dgst -sha256 -hmac`.
    keyring = Keyring([b"k" * 32])
    assert keyring.token("stream") == "ySf-owzd7WalpUDQqWdk16pucpvKJC0vBCDKPVPGci8"


def test_tokens_and_ids_are_256_bits_url_safe() -> None:
    for text in (Keyring.load(None).token("x"), new_id()):
        assert len(base64.urlsafe_b64decode(text + "=")) == 32
        assert "=" not in text


def test_ids_do_not_come_twice() -> None:
    for make in (new_id, new_request_id):
        assert len({make() for _ in range(1000)}) == 1000


@given(ANY_TEXT, ANY_TEXT)
@example("\ud800", "\udfff")
@example("", "")
@example("s", "é" * 43)
def test_whatever_a_client_sends_is_just_not_a_token(stream_id: str, token: str) -> None:
    keyring = Keyring([b"k" * 32])
    assert not keyring.is_token_of(stream_id, token)
    assert keyring.is_token_of(stream_id, keyring.token(stream_id))


def test_a_token_with_anything_added_or_missing_is_none() -> None:
    keyring = Keyring.load(None)
    token = keyring.token("s")
    for near in (token + "=", token[:-1], token + "A", " " + token, token.swapcase()):
        assert not keyring.is_token_of("s", near)


def test_keys_outlive_the_process_that_made_them(path: Path) -> None:
    token = Keyring.load(path).token("s")
    assert Keyring.load(path).is_token_of("s", token)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_an_old_key_is_honoured_and_a_new_one_used(path: Path) -> None:
    write_keys(path, key_line(1))
    old = Keyring.load(path).token("s")
    write_keys(path, key_line(2) + key_line(1))
    both = Keyring.load(path)
    assert both.is_token_of("s", old)
    assert both.token("s") != old
    write_keys(path, key_line(2))
    assert Keyring.load(path).token("s") == both.token("s")
    assert not Keyring.load(path).is_token_of("s", old)


def test_of_many_who_make_the_file_at_once_all_get_the_same_key(path: Path) -> None:
    tokens: list[str] = []
    start = threading.Barrier(8)

    def load() -> None:
        start.wait()
        tokens.append(Keyring.load(path).token("s"))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tokens) == 8
    assert len(set(tokens)) == 1
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666, 0o601])
def test_keys_that_others_may_use_are_refused(path: Path, mode: int) -> None:
    write_keys(path, key_line(1), mode)
    with pytest.raises(JournalUnusable, match=f"mode {mode:04o}.*chmod 600"):
        Keyring.load(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n",
        b"key",
        key_line(1)[:-3],
        key_line(1)[:-2] + b"AA\n",
        key_line(1) + b"# a comment\n",
        key_line(1).replace(b"B", b"+", 1),
        b"\xff" * 44,
        key_line(1) * 2000,
    ],
)
def test_a_file_that_does_not_hold_keys_is_refused(path: Path, content: bytes) -> None:
    write_keys(path, content)
    with pytest.raises(JournalUnusable, match="does not hold keys"):
        Keyring.load(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "content",
    [
        key_line(1).rstrip(b"\n"),
        key_line(1).rstrip(b"=\n"),
        key_line(1).replace(b"\n", b"\r\n\r\n"),
    ],
)
def test_a_key_may_have_lost_its_padding_or_line_end(path: Path, content: bytes) -> None:
    write_keys(path, content)
    assert Keyring.load(path).token("s") == Keyring([b"\x01" * 32]).token("s")


def test_keys_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    for place in (tmp_path / "missing" / "key", tmp_path):
        with pytest.raises(JournalUnusable, match="cannot be used"):
            Keyring.load(place)


def test_a_keyring_does_not_show_its_keys() -> None:
    keyring = Keyring([b"k" * 32])
    assert "kkk" not in repr(keyring)
    assert "kkk" not in str(vars(keyring).keys())


def test_a_keyring_needs_a_key() -> None:
    with pytest.raises(ValueError, match="needs a key"):
        Keyring([])
