"""Mistakes that can be put into the code, to see that the simulation finds them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """With a mistake, where one is named, for the length of a block."""
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            PLANTS[name](patch)
        yield


PLANTS: Final[dict[str, Plant]] = {}
