"""Tickets, tokens and event ids: input that an attacker may make up."""

from msgspec.structs import replace

from streams import keys
from streams.client import wire
from streams.engine.sessions import parts_of
from streams.keys import Keyring
from streams.protocol.ticket import Ticket

KEYRING = Keyring([bytes(range(32)), bytes(32)])
STREAM = "a" * 43
CALL = bytes(32)


def ticket(data: bytes) -> None:
    """`Ticket.parse` takes only text that `str` wrote, and refuses all other text with a reason."""
    try:
        found = Ticket.parse(data.decode("utf-8", "surrogateescape"))
    except ValueError as error:
        assert str(error)
        return
    assert Ticket.parse(str(found)) == found
    assert repr(found) == repr(replace(found, token="another"))
    try:
        assert wire.resume(found, 1, found.after).endswith(b"\n")
    except ValueError as error:
        assert str(error)


def token(data: bytes) -> None:
    """A token check refuses the bytes as a token, and refuses any change of a good token."""
    given = data.decode("utf-8", "surrogatepass") if _is_text(data) else data.decode("latin-1")
    good = KEYRING.token(STREAM)
    changed = "".join(
        chr(ord(letter) ^ mask)
        for letter, mask in zip(good, data.ljust(len(good), b"\0"), strict=False)
    )
    for each in (given, changed, good + given, given + good):
        assert KEYRING.is_token_of(STREAM, each) == (each in _tokens())
        assert len(keys.name_of(each)) == 16
    _try_page(given)
    page = KEYRING.page_token(STREAM, 7, CALL)
    masks = data.ljust(len(page), b"\0")
    _try_page("".join(chr(ord(letter) ^ mask) for letter, mask in zip(page, masks, strict=False)))


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True


def _tokens() -> list[str]:
    return [Keyring([key]).token(STREAM) for key in (bytes(range(32)), bytes(32))]


def _try_page(given: str) -> None:
    place = keys.place_of(given)
    is_good = given == KEYRING.page_token(STREAM, 7, CALL)
    assert KEYRING.is_page_token_of(STREAM, 7, CALL, given) == is_good
    if is_good:
        assert place == (keys.name_of(KEYRING.token(STREAM)), 7)
    elif place is not None:
        name, seq = place
        assert len(name) == 16
        assert 0 <= seq < 1 << 48
        assert not KEYRING.is_page_token_of(STREAM, seq, CALL, given)


def event_id(data: bytes) -> None:
    """An event id is valid with a name in it, or invalid: never half of one."""
    given = data.decode("latin-1")
    name, _ = parts_of(given)
    if name:
        assert len(name) == 16
        assert given.startswith(f"{name.hex()}_")
        assert given.isascii()
    else:
        assert name == b""
