"""Programs and rights that a machine may lack: a test that needs them is skipped there, but not in
CI.
"""

import os
import shutil
from typing import Final, NoReturn

import pytest

NOBODY: Final = 65534


def lacking(what: str) -> NoReturn:
    """Skip the test for this reason, or fail it where skips are forbidden."""
    if os.environ.get("SKIP_NOTHING"):  # set by .ci/run
        pytest.fail(what)
    pytest.skip(what)


def needed(program: str, to: str) -> str:
    """The path of a program; skips the test where it is missing."""
    # Debian puts some servers into a folder that only root has in its path.
    path = shutil.which(program, path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
    if path is None:
        lacking(f"there is no {program}, which is needed to {to}")
    return path


def another_user() -> int:
    """The uid of another user, to give files and processes to: only root can do so."""
    if os.geteuid() != 0:
        lacking("this test needs root, to be two users")
    return NOBODY
