"""One owner, one starter, and none of either once their process is dead."""

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streams.errors import JournalUnusable
from streams.journal.ownership import (
    Heir,
    Leave,
    OwnerLock,
    StarterLock,
    key_path,
    lock_path,
    log_path,
    owner_of,
    socket_path,
)
from tests.rigs import ROOT

HOLDING = """
    import sys
    from pathlib import Path
    from streams.journal.ownership import OwnerLock, StarterLock

    locks = {"owner": OwnerLock, "starter": StarterLock}
    held = [locks[name](Path(sys.argv[1])) for name in sys.argv[2:]]
    print([lock.acquire() for lock in held], flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@contextmanager
def another_process(
    journal: Path, *names: str, is_late: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Another process that has these locks, until it is killed at the end."""
    got = [None if name == "owner" else not is_late for name in names]
    command = [sys.executable, "-c", textwrap.dedent(HOLDING), str(journal), *names]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{got}\n"
        try:
            yield process
        finally:
            process.kill()


def can_own(journal: Path) -> bool:
    lock = OwnerLock(journal)
    try:
        lock.acquire()
    except JournalUnusable:
        return False
    lock.release()
    return True


def can_own_elsewhere(journal: Path) -> bool:
    program = (
        "import sys, pathlib; from streams.journal.ownership import OwnerLock; "
        "OwnerLock(pathlib.Path(sys.argv[1])).acquire()"
    )
    command = [sys.executable, "-c", program, str(journal)]
    return subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL, check=False).returncode == 0


def test_side_files_stand_beside_the_journal(tmp_path: Path) -> None:
    real = tmp_path / "real.db"
    link = tmp_path / "link.db"
    link.symlink_to(real)
    for journal in (real, link):
        assert lock_path(journal) == tmp_path / "real.db.lock"
        assert socket_path(journal) == tmp_path / "real.db.sock"
        assert log_path(journal) == tmp_path / "real.db.log"
        assert key_path(journal) == tmp_path / "real.db.key"


def test_an_owner_is_the_only_one_in_its_process(journal: Path) -> None:
    lock = OwnerLock(journal)
    lock.acquire()
    with pytest.raises(JournalUnusable, match="already owned by this process"):
        OwnerLock(journal).acquire()
    lock.release()
    assert can_own(journal)


def test_an_owner_is_the_only_one_of_all_processes(journal: Path) -> None:
    with another_process(journal, "owner") as other:
        message = rf"already owned by another process \(pid {other.pid}\)"
        with pytest.raises(JournalUnusable, match=message):
            OwnerLock(journal).acquire()


def test_the_locks_end_with_the_process(journal: Path) -> None:
    with another_process(journal, "owner", "starter") as other:
        other.kill()
        other.wait()
        assert can_own(journal)
        assert StarterLock(journal).acquire()


def test_others_can_see_who_owns_it_and_are_in_nobodys_way(journal: Path) -> None:
    assert owner_of(journal) is None
    with another_process(journal, "starter"):
        assert owner_of(journal) is None, "a starter is no owner"
    with another_process(journal, "owner") as other:
        assert owner_of(journal) == other.pid
        assert not can_own(journal)
        other.kill()
        other.wait()
        assert owner_of(journal) is None, "though its name is still in the file"


def test_a_refused_owner_does_not_drop_what_its_process_holds(journal: Path) -> None:
    lock = OwnerLock(journal)
    lock.acquire()
    assert not can_own(journal)
    assert not can_own_elsewhere(journal)
    lock.release()
    assert can_own_elsewhere(journal)


def test_owner_and_starter_do_not_stand_in_each_others_way(journal: Path) -> None:
    owner, starter = OwnerLock(journal), StarterLock(journal)
    assert starter.acquire()
    owner.acquire()
    starter.release()
    assert not can_own_elsewhere(journal)  # closing the file now would have dropped the lock
    owner.release()


def test_a_starter_keeps_its_lock_when_it_finds_an_owner(journal: Path) -> None:
    with another_process(journal, "owner"):
        starter = StarterLock(journal)
        assert starter.acquire()
        assert not can_own(journal)
        with another_process(journal, "starter", is_late=True):
            assert not StarterLock(journal).acquire()
        starter.release()


def test_one_starter_at_a_time(journal: Path) -> None:
    first, second = StarterLock(journal), StarterLock(journal)
    assert first.acquire()
    assert not second.acquire()
    second.release()
    assert not second.acquire()
    first.release()
    assert second.acquire()
    second.release()
    with another_process(journal, "starter"):
        assert not first.acquire()


def test_releasing_what_one_does_not_have_does_nothing(journal: Path) -> None:
    OwnerLock(journal).release()
    lock = OwnerLock(journal)
    lock.acquire()
    lock.release()
    lock.release()


def test_the_lock_is_readable_by_its_owner_alone_and_stays(journal: Path) -> None:
    assert can_own(journal)
    assert lock_path(journal).stat().st_mode & 0o777 == 0o600


def test_where_nothing_can_be_locked_the_message_says_why(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "journal.db"
    for lock in (OwnerLock(missing), StarterLock(missing)):
        with pytest.raises(JournalUnusable, match=f"no directory {missing.parent}: create it"):
            lock.acquire()
    blocked = tmp_path / "journal.db"
    lock_path(blocked).mkdir()
    with pytest.raises(JournalUnusable, match="cannot be locked"):
        OwnerLock(blocked).acquire()


HEIR = """
    import sys
    from pathlib import Path
    from streams.journal.ownership import Heir

    heir = Heir(Path(sys.argv[1]))
    heir.acquire()
    for order in sys.stdin:
        answer = getattr(heir, order.strip())
        print(answer() if callable(answer) else answer, flush=True)
"""


@contextmanager
def heir_of(journal: Path) -> Iterator[Callable[[str], str]]:
    """Another process that waits for the journal, and does what it is told."""
    command = [sys.executable, "-c", textwrap.dedent(HEIR), str(journal)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def tell(order: str) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{order}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        try:
            yield tell
        finally:
            process.kill()


def test_an_owner_and_its_heir_tell_each_other_who_listens(journal: Path) -> None:
    lock = OwnerLock(journal)
    lock.acquire()
    with heir_of(journal) as tell:
        assert (tell("is_owned"), tell("may_listen")) == ("True", "False")
        with pytest.raises(JournalUnusable, match="another process already waits"):
            Heir(journal).acquire()
        leave = Leave(journal)
        assert (leave.has_heir, leave.is_followed) == (True, False)
        assert tell("may_listen") == "True"
        tell("listens")
        assert leave.is_followed
        lock.release()
        assert tell("is_owned") == "False"
        tell("release")
        assert (leave.has_heir, leave.is_followed) == (False, False)


def test_a_dead_heir_is_none(journal: Path) -> None:
    with heir_of(journal) as tell:
        assert tell("is_owned") == "False"
    leave = Leave(journal)
    assert not leave.has_heir
