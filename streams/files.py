"""Files that are written wholly or not at all, even if the power fails, with mode 0600."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from streams.permissions import check_folder


@contextmanager
def whole(path: Path, put: Callable[[str, Path], None]) -> Iterator[Path]:
    """Yield a new file beside `path` for the block to write, then move it there with `put`, such as
    `os.replace`.

    Raises `UnsafeFile` where other users could replace the file, another `OSError`, or an error of
    `put`. The new file is then removed.
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
    """The same for content in memory."""
    with whole(path, put) as file:
        file.write_bytes(content)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
