"""Very many invalid page tokens: each gets the same answer, and has no other effect.

5,000 of them; `SCALE=full pytest tests/wire/test_pages_stress.py --timeout 3600` sends a million.
"""

import os
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from tests.wire.conftest import Wire
from tests.wire.pages_verbs import (
    all_invalid,
    answers_to_all,
    ask_page,
    following,
    page_params,
    text_of,
)
from tests.wire.process import ServerProcess

FORGERIES = 1_000_000 if os.environ.get("SCALE") == "full" else 5_000
BETWEEN_USES = 1_000  # a page token that is not used for ten minutes is void
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


def forged(token: str, dice: random.Random) -> str:
    """A random token of the right length and alphabet."""
    return "".join(dice.choice(ALPHABET) for _ in token)


def truncated(token: str, dice: random.Random) -> str:
    return token[: dice.randrange(len(token))]


def flipped(token: str, dice: random.Random) -> str:
    at = dice.randrange(len(token))
    return token[:at] + chr(ord(token[at]) ^ 1 << dice.randrange(8)) + token[at + 1 :]


def crossed(token: str, other: str, dice: random.Random) -> str:
    """The head of one token and the tail of another."""
    at = dice.randrange(1, len(token))
    return token[:at] + other[at:]


def attempts(token: str, other: str, dice: random.Random) -> Iterator[dict[str, Any]]:
    """Calls whose token does not fit; `token` is that of `anything` with the value 1, `other` with
    2.
    """
    for number in range(FORGERIES):
        way = number % 5
        if way == 0:
            yield page_params("anything", forged(token, dice), value=1)
        elif way == 1:
            yield page_params("anything", truncated(token, dice), value=1)
        elif way == 2:
            yield page_params("anything", flipped(token, dice), value=1)
        elif way == 3 and (mixed := crossed(token, other, dice)) not in (token, other):
            yield page_params("anything", mixed, value=1)
        else:  # a real token, of another call
            tool = dice.choice(["anything", "anything_else"])
            yield page_params(tool, token, value=dice.choice([2, True, "1", None, [1]]))


@pytest.mark.parametrize("wire", ["ws-streams"], indirect=True)
def test_no_forgery_is_ever_honoured(wire: Wire, server: ServerProcess) -> None:
    """W§3: "Changed params, another principal, expired, completed, garbled: -32602
    `invalid_token`", byte for byte the same; the real one is as good as before."""
    peer = wire.plain()
    token = following(ask_page(peer, "anything", value=1))
    other = following(ask_page(peer, "anything", value=2))
    forgeries = attempts(token, other, random.Random(17))
    lines_before = len(server.log)
    while some := list(islice(forgeries, BETWEEN_USES)):
        all_invalid(answers_to_all(peer, some))
        for real, value in ((token, 1), (other, 2)):
            assert text_of(ask_page(peer, "anything", real, value=value)) == "page 2"
    assert server.is_alive()
    assert len(server.log) - lines_before <= FORGERIES, "a line for each at most"
    assert text_of(ask_page(wire.plain(), "anything", other, value=2)) == "page 2"
