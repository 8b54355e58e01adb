"""What the targets share: bytes as a peer sends them, in whatever pieces, and coroutines that need
no loop.
"""

import random
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")
PIECES_MAX = 8


def ways_to_cut(data: bytes) -> Iterator[list[bytes]]:
    """What a peer sent, in one piece, in bytes, and as the first of the bytes says, which is not
    sent.
    """
    seed, sent = data[:1], data[1:]
    yield [sent]
    yield [sent[at : at + 1] for at in range(len(sent))]
    dice = random.Random(seed)
    cuts = sorted(dice.randrange(len(sent) + 1) for _ in range(dice.randrange(1, PIECES_MAX)))
    yield [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True) if a < b]


def same_however_cut(data: bytes, read: Callable[[Iterable[bytes]], _T]) -> _T:
    """What `read` makes of it, which must not depend on how it is cut."""
    found = [read(pieces) for pieces in ways_to_cut(data)]
    assert all(each == found[0] for each in found), found
    return found[0]


def done(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """What a coroutine returns that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as returned:
        result: _T = returned.value
        return result
    raise AssertionError("it waits")
