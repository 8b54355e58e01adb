"""Files that are wholly there or not at all, also if the power fails, and their owner's alone."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, content: bytes, put: Callable[[str, Path], None]) -> None:
    """Write a file of mode 0600 beside `path`, and `put` it there, as `os.replace` does.

    Raises `OSError`, also what `put` raises; then nothing is left behind.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        put(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
