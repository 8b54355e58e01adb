"""What `Journal.read` makes of stored runs, whatever they are stored in."""

from collections.abc import Iterable, Sequence

from streams.errors import Missing
from streams.journal.contract import STORED_BYTES_MAX
from streams.messages import Run


def joined(stored: Iterable[Run], after: int, bytes_max: int) -> Sequence[Run]:
    """What `Journal.read` returns, from the runs that reach beyond `after`, in order.

    Raises `Missing` where one is missing ahead of another: a gap is never handed on.
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
        if size > room or 2 * room < STORED_BYTES_MAX:  # what is long enough is not copied
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
