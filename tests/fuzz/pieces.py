"""Helpers of the targets: bytes cut into pieces, and coroutines that run without a loop."""

import random
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")
PIECES_MAX = 8


def ways_to_cut(data: bytes) -> Iterator[list[bytes]]:
    """The data whole, byte by byte, and cut as its first byte says; that byte is left out."""
    seed, sent = data[:1], data[1:]
    yield [sent]
    yield [sent[at : at + 1] for at in range(len(sent))]
    dice = random.Random(seed)
    cuts = sorted(dice.randrange(len(sent) + 1) for _ in range(dice.randrange(1, PIECES_MAX)))
    yield [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True) if a < b]


def same_however_cut(data: bytes, read: Callable[[Iterable[bytes]], _T]) -> _T:
    """The result of `read`, which must not depend on the cuts."""
    found = [read(pieces) for pieces in ways_to_cut(data)]
    assert all(each == found[0] for each in found), found
    return found[0]


def done(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as returned:
        result: _T = returned.value
        return result
    raise AssertionError("it waits")
