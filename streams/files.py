"""Files that are wholly there or not at all, also if the power fails, and their owner's alone."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from streams.permissions import check_folder


@contextmanager
def whole(path: Path, put: Callable[[str, Path], None]) -> Iterator[Path]:
    """A file of mode 0600 beside `path` for the block to write; then `put` it there, as
    `os.replace` does.

    Raises `UnsafeFile` where other users could replace the file, another `OSError`, or what `put`
    raises; then nothing is left behind.
    """
    check_folder(path.parent)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        yield Path(temporary)
        os.fsync(descriptor)
        put(temporary, path)
    finally:
        os.close(descriptor)
        Path(temporary).unlink(missing_ok=True)
    _sync_folder(path.parent)


def write_whole(path: Path, content: bytes, put: Callable[[str, Path], None]) -> None:
    """The same for content that is there already."""
    with whole(path, put) as file:
        file.write_bytes(content)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
