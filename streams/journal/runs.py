"""How `Journal.read` joins stored runs, and the memory for them: the same for every backend."""

from collections.abc import Iterable, Sequence
from typing import Final

from streams.errors import Missing
from streams.journal.contract import STORED_BYTES_MAX
from streams.limits import MIB
from streams.messages import Run

_FREED_BYTES: Final = 2 * MIB


def keep_freed_memory() -> None:
    """Let this process keep the memory of the runs of a read for the next one.

    glibc keeps blocks up to the size of the largest mapped one that was ever freed, and twice as
    much at the end of its heap (mallopt(3), M_MMAP_THRESHOLD). Otherwise each read has to fault its
    pages in: a fifth of its time out of a file, and half of it out of a store.
    """
    bytes(_FREED_BYTES)


def joined(stored: Iterable[Run], after: int, bytes_max: int) -> Sequence[Run]:
    """The runs that `Journal.read` returns, from the stored ones that reach beyond `after`.

    `stored` is in order. Raises `Missing` if lines are missing between two runs: a gap is never
    returned.
    """
    runs = iter(stored)
    first = next(runs, None)
    if first is None:
        return []
    if first.seq > after + 1:
        raise Missing(after + 1, first.seq - 1)
    first = first.after(after)
    if len(first.body) > bytes_max:
        return [next(first.split(bytes_max))]
    groups, next_seq = [[first]], first.last + 1
    bytes_left, room = bytes_max - len(first.body), STORED_BYTES_MAX - len(first.body)
    for run in runs:
        if run.seq != next_seq:
            raise Missing(next_seq, run.seq - 1)
        size, next_seq = len(run.body), run.last + 1
        bytes_left -= size
        if bytes_left < 0:
            break
        if size > room or 2 * room < STORED_BYTES_MAX:  # a run that is long enough is not copied
            groups.append([])
            room = STORED_BYTES_MAX
        groups[-1].append(run)
        room -= size
    return [as_one(group) for group in groups]


def as_one(group: Sequence[Run]) -> Run:
    """Runs that follow each other, as one."""
    first, *others = group
    if not others:
        return first
    body = b"".join([run.body for run in group])
    return Run(first.seq, others[-1].last + 1 - first.seq, body)
