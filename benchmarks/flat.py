"""A server's use of resources, second by second, and whether it is flat."""

import os
import sqlite3
import statistics
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from benchmarks.memory import resident_bytes

MIB: Final = 1024 * 1024
HOUR_S: Final = 3600.0

# The warm-up, which is not examined: by its end everything must have been deleted once.
WARM_UP: Final = 0.25
SAMPLES_MIN: Final = 3  # samples after that; fewer show nothing


class Sample(msgspec.Struct, frozen=True):
    """The resources in use at one moment, `at_s` seconds after the first client came.

    `used_bytes` is the part of the journal's file that is not free for new pages.
    """

    at_s: float
    resident_bytes: int
    descriptors: int
    threads: int
    wal_bytes: int
    file_bytes: int
    used_bytes: int
    streams: int  # in the journal
    sessions: int

    @classmethod
    def taken(cls, at_s: float, pid: int, journal: Path) -> "Sample":
        """Sample a process and its journal. Raises `OSError` where the process has ended."""
        used_bytes, streams, sessions = _counted(journal)
        return cls(
            at_s=at_s,
            resident_bytes=resident_bytes(pid),
            descriptors=len(os.listdir(f"/proc/{pid}/fd")),
            threads=len(os.listdir(f"/proc/{pid}/task")),
            wal_bytes=journal.with_name(f"{journal.name}-wal").stat().st_size,
            file_bytes=journal.stat().st_size,
            used_bytes=used_bytes,
            streams=streams,
            sessions=sessions,
        )


def _counted(journal: Path) -> tuple[int, int, int]:
    """Bytes in use, streams and sessions, all at one moment."""
    with closing(sqlite3.connect(f"{journal.as_uri()}?mode=ro", uri=True)) as db:
        db.execute("BEGIN")
        words = ("page_size", "page_count", "freelist_count")
        size, pages, free = (db.execute(f"PRAGMA {word}").fetchone()[0] for word in words)
        [streams] = db.execute("SELECT count(*) FROM streams").fetchone()
        [sessions] = db.execute("SELECT count(*) FROM sessions").fetchone()
    return size * (pages - free), streams, sessions


class Bound(NamedTuple):
    """How far the last tenth of a series may be above the first: a share of it, and a constant.

    `of` names another series, whose highest value is the base instead. The last tenth may reach
    `least` in any case.
    """

    share: float
    slack: float
    of: str = ""
    least: float = 0.0


BOUNDS: Final = {
    "resident_bytes": Bound(0.05, 8 * MIB),
    "descriptors": Bound(0.25, 16),
    "threads": Bound(0.0, 6),
    # A WAL does not shrink either: it starts over at 32 MiB, or one commit later.
    "wal_bytes": Bound(0.1, 8 * MIB, least=40 * MIB),
    "used_bytes": Bound(0.15, 12 * MIB),
    # A file does not shrink: its size is the highest use so far, also between two samples.
    "file_bytes": Bound(0.25, 8 * MIB, of="used_bytes"),
    "streams": Bound(0.15, 100),
    "sessions": Bound(0.15, 50),
}


class Series(msgspec.Struct, frozen=True):
    """The figures of one series: medians of its first and last tenth after the warm-up."""

    name: str
    first: float
    last: float
    highest: float
    per_hour: float  # the slope of the regression line
    allowed: float  # for `last`

    @property
    def is_flat(self) -> bool:
        """Whether the last tenth is within its bound."""
        return self.last <= self.allowed


def verdict(samples: Sequence[Sample]) -> list[Series]:
    """The figures of all series of a run. Raises `ValueError` where the run was too short."""
    ends_at = samples[-1].at_s if samples else 0.0
    steady = [sample for sample in samples if sample.at_s >= WARM_UP * ends_at]
    if len(steady) < SAMPLES_MIN:
        raise ValueError(f"{len(steady)} samples behind the warm-up tell nothing")
    return [_series(name, bound, steady) for name, bound in BOUNDS.items()]


def _series(name: str, bound: Bound, samples: Sequence[Sample]) -> Series:
    values = [float(getattr(sample, name)) for sample in samples]
    tenth = max(1, len(values) // 10)
    first, last = statistics.median(values[:tenth]), statistics.median(values[-tenth:])
    base = max(getattr(sample, bound.of) for sample in samples) if bound.of else first
    line = statistics.linear_regression([sample.at_s for sample in samples], values)
    return Series(
        name=name,
        first=first,
        last=last,
        highest=max(values),
        per_hour=line.slope * HOUR_S,
        allowed=max(bound.least, (1 + bound.share) * base + bound.slack),
    )
