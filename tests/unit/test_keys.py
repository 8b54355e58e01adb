"""Tokens open one stream, for as long as their key is known, and keys are nobody else's."""

import base64
import os
import stat
import threading
from pathlib import Path
from string import ascii_letters, digits

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streams.errors import JournalUnusable
from streams.keys import Keyring, name_of, new_id, new_request_id, new_stream_id, place_of

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


def test_the_name_of_a_call_is_a_keyed_hash_of_its_key_and_scope() -> None:
    # Worked out with `openssl dgst -sha256 -hmac` from `call:5:os(0)a key`.
    assert Keyring([b"k" * 32]).call_names("os(0)", "a key") == [
        bytes.fromhex("383b54d0dc51f5538cf3ba494281139f")
    ]


def test_a_call_has_another_name_in_another_scope_and_under_another_key() -> None:
    keyring = Keyring([b"n" * 32, b"o" * 32])
    names = [
        name
        for scope, key in (("", "ab"), ("a", "b"), ("ab", ""), ("", "ab2"), ("1:a", "b"))
        for name in keyring.call_names(scope, key)
    ]
    assert len(set(names)) == 10
    assert keyring.call_names("", "ab")[1:] == Keyring([b"o" * 32]).call_names("", "ab")


def test_keys_are_known_by_the_oldest_of_them() -> None:
    old, new = b"o" * 32, b"n" * 32
    assert Keyring([new, old]).identity == Keyring([old]).identity != Keyring([new]).identity
    assert len(Keyring.load(None).identity) == 43


def test_tokens_and_ids_are_256_bits_url_safe() -> None:
    for text in (Keyring.load(None).token("x"), new_id()):
        assert len(base64.urlsafe_b64decode(text + "=")) == 32
        assert "=" not in text


def test_no_id_is_taken_for_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter(["-first", "--second", "th-ird"])
    monkeypatch.setattr("secrets.token_urlsafe", lambda _: next(drawn))
    assert new_id() == "th-ird"


@pytest.mark.parametrize("now", [0.0, 1.8e9, 2.0**29 - 1, 2.0**31])
def test_the_ids_of_streams_that_begin_together_lie_together(now: float) -> None:
    ids = {new_stream_id(now + n / 1000) for n in range(900)}
    assert len(ids) == 900
    assert len({each[:4] for each in ids}) == 1
    assert new_stream_id(now + 3600)[:4] != min(ids)[:4]
    for each in ids:
        assert len(base64.urlsafe_b64decode(each + "=")) == 32
        assert not each.startswith("-")


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


# Tokens of pages

CALL = b"c" * 32
LETTERS = ascii_letters + digits + "-_"


def test_a_page_token_is_of_its_page_and_of_no_other() -> None:
    keyring = Keyring.load(None)
    token = keyring.page_token("s", 5, CALL)
    assert keyring.is_page_token_of("s", 5, CALL, token)
    assert not keyring.is_page_token_of("s", 4, CALL, token)
    assert not keyring.is_page_token_of("t", 5, CALL, token)
    assert not keyring.is_page_token_of("s", 5, b"d" * 32, token)
    assert not Keyring.load(None).is_page_token_of("s", 5, CALL, token)


def test_a_page_token_is_made_again_as_it_was() -> None:
    keyring = Keyring([b"k" * 32])
    assert keyring.page_token("s", 5, CALL) == Keyring([b"k" * 32]).page_token("s", 5, CALL)
    assert set(keyring.page_token("s", 5, CALL)) <= set(LETTERS)


@pytest.mark.parametrize("seq", [0, 1, 2**32, 2**48 - 1])
def test_a_page_token_tells_where_its_page_is(seq: int) -> None:
    keyring = Keyring.load(None)
    place = place_of(keyring.page_token("s", seq, CALL))
    assert place == (keyring.names("s")[0], seq)


def test_every_letter_of_a_page_token_counts() -> None:
    keyring = Keyring([b"k" * 32])
    token = keyring.page_token("s", 5, CALL)
    bits = base64.urlsafe_b64decode(token)
    for at in range(len(bits) * 8):
        flipped = bytearray(bits)
        flipped[at // 8] ^= 1 << at % 8
        text = base64.urlsafe_b64encode(flipped).decode()
        place = place_of(text)
        assert place is not None
        for seq in (5, place[1]):  # also as the token of the page that it names now
            assert not keyring.is_page_token_of("s", seq, CALL, text)
    for at, letter in enumerate(token):
        for other in LETTERS:
            near = token[:at] + other + token[at + 1 :]
            assert keyring.is_page_token_of("s", 5, CALL, near) is (other == letter)


def test_a_page_token_with_anything_added_or_missing_leads_nowhere() -> None:
    keyring = Keyring.load(None)
    token = keyring.page_token("s", 5, CALL)
    for near in (token + "=", token[:-1], token + "AAAA", " " + token[1:]):
        assert not keyring.is_page_token_of("s", 5, CALL, near)
        assert place_of(near) is None
    for near in (token[:-1] + "=", token[:-1] + "+", token.swapcase()):
        assert not keyring.is_page_token_of("s", 5, CALL, near)


@given(ANY_TEXT | st.text(LETTERS + "=+/", min_size=70, max_size=74))
@example("é" * 72)
@example("=" * 72)
@example("\ud800" * 72)
def test_whatever_a_client_sends_for_a_page_leads_nowhere(token: str) -> None:
    keyring = Keyring([b"k" * 32])
    name, seq = place_of(token) or (b"", 0)
    assert name not in keyring.names("s")
    assert not keyring.is_page_token_of("s", seq, CALL, token)


@given(st.binary(min_size=54, max_size=54))
def test_bytes_that_nobody_made_lead_nowhere(bits: bytes) -> None:
    token = base64.urlsafe_b64encode(bits).decode()
    place = place_of(token)
    assert place == (bits[:16], int.from_bytes(bits[16:22], "big"))
    assert not Keyring([b"k" * 32]).is_page_token_of("s", place[1], CALL, token)


def test_a_stream_is_found_by_its_token_and_by_those_of_its_pages() -> None:
    keyring = Keyring.load(None)
    (name,) = keyring.names("s")
    assert name_of(keyring.token("s")) == name
    place = place_of(keyring.page_token("s", 7, CALL))
    assert place is not None
    assert place[0] == name
    assert keyring.names("t") != [name]
    assert name not in keyring.token("s").encode()


def test_what_an_old_key_made_is_found_and_honoured_under_a_new_one() -> None:
    one, two = b"1" * 32, b"2" * 32
    old, both, new = Keyring([one]), Keyring([two, one]), Keyring([two])
    token, page = old.token("s"), old.page_token("s", 5, CALL)
    assert both.names("s") == new.names("s") + old.names("s")
    assert name_of(token) in both.names("s")
    assert name_of(token) not in new.names("s")
    assert both.is_page_token_of("s", 5, CALL, page)
    assert not new.is_page_token_of("s", 5, CALL, page)
    assert both.page_token("s", 5, CALL) == new.page_token("s", 5, CALL) != page


@given(ANY_TEXT)
def test_any_text_has_a_name(token: str) -> None:
    assert len(name_of(token)) == 16
