"""The plan of one seed: the calls, the limits, and how often each fault occurs."""

import random
from typing import Final

import msgspec

from streams.journal.sqlite.log import Budget
from streams.limits import Limits

# The `max` of calls that may be abandoned, and of all others.
BRIEF_S: Final = 30.0
LONG_S: Final = 7 * 86_400.0

# Servers die often: a tool that waits long may have to restart many times.
ALWAYS: Final = 1_000_000
LIMITS: Final = (
    Limits(restarts_max=ALWAYS),
    Limits(restarts_max=ALWAYS, unsent_entries_max=5, resident_max=0, tombstone_s=40, drained_s=40),
    Limits(restarts_max=ALWAYS, unsent_entries_max=50, unsent_bytes_max=3_000, resident_max=2),
    Limits(restarts_max=ALWAYS, undelivered_bytes_max=2_000, resident_max=1),
    Limits(restarts_max=ALWAYS, streams_per_principal_max=3, resident_max=1),
)
BUDGETS: Final = (
    Budget(),
    Budget(log_bytes=4_000, segment_bytes=300, direct_bytes=2_000, streams_max=2),
    Budget(log_bytes=600, segment_bytes=10_000, direct_bytes=100_000),
    Budget(log_bytes=0, streams_max=0),
)
TOOLS: Final = ("talk", "talk", "talk", "brief", "strict", "lasting", "lasting")
KINDS: Final = ("say", "say", "say", "report", "ask", "flush", "wait", "burst")


class Step(msgspec.Struct, frozen=True):
    """A tool's next step: send or report so many things, ask, flush, or wait so many seconds."""

    kind: str
    count: int = 1
    pause_s: float = 0.0  # before each of them


class Part(msgspec.Struct, frozen=True):
    """One call: which tool does what, and how its caller behaves."""

    key: str
    tool: str
    steps: tuple[Step, ...]
    fails: bool
    starts_at: float
    dialects: tuple[str, ...]
    is_plain: bool  # a client without positions
    restlessness: float  # how likely its caller does something unusual at each message

    @property
    def is_lasting(self) -> bool:
        """Whether its tool restarts after its server has died."""
        return self.tool == "lasting"

    @property
    def said(self) -> int:
        """The number of its log messages."""
        return sum(step.count for step in self.steps if step.kind in ("say", "burst"))

    @property
    def asked(self) -> int:
        """The number of its questions."""
        return sum(step.count for step in self.steps if step.kind == "ask")


class Plan(msgspec.Struct, frozen=True):
    """All choices that are made before the beginning."""

    seed: int
    journal: str  # "file" or "memory"
    budget: Budget
    limits: Limits
    min_s: float
    chaos_s: float  # from then on no fault occurs
    crash_every_s: float  # on average
    cut_every_s: float  # each connection
    trouble_every_s: float  # the journal is full
    latency_s: float
    read_bytes: int  # the part of a backlog that one write may take; 0 is no limit
    processes: int  # of clients
    parts: tuple[Part, ...]


def plan_of(chance: random.Random, seed: int) -> Plan:
    """Draw the plan of a seed."""
    limits = chance.choice(LIMITS)
    chaos_s = chance.uniform(430, 650)
    # A client without confirmations counts too many unconfirmed messages as delivered; and a full
    # journal deletes messages that were written. Such limits are for clients with positions.
    may_be_plain = limits.undelivered_bytes_max > 10_000 and limits.streams_per_principal_max > 10
    return Plan(
        seed=seed,
        journal=chance.choice(("file", "file", "memory")),
        budget=chance.choice(BUDGETS),
        limits=limits,
        min_s=chance.choice((0.0, 0.1, 2.0)),
        chaos_s=chaos_s,
        crash_every_s=chance.choice((20.0, 60.0, 150.0, 1e9)),
        cut_every_s=chance.choice((5.0, 20.0, 80.0, 1e9)),
        trouble_every_s=chance.choice((30.0, 120.0, 1e9, 1e9)),
        latency_s=chance.choice((0.0, 0.005, 0.2)),
        read_bytes=seed % 2 * 1_000,
        processes=chance.choice((1, 2, 2, 3)),
        parts=tuple(
            _part(chance, f"c{n}", 0.8 * chaos_s, may_be_plain=may_be_plain)
            for n in range(chance.randint(2, 7))
        ),
    )


def _part(chance: random.Random, key: str, until_s: float, *, may_be_plain: bool) -> Part:
    is_plain = may_be_plain and chance.random() < 0.35
    dialects = [("streams",), ("resumableRequests",)]
    if not is_plain:
        dialects.append(("streams", "resumableRequests"))
    return Part(
        key=key,
        tool=chance.choice(TOOLS),
        steps=tuple(_step(chance) for _ in range(chance.randint(1, 6))),
        fails=chance.random() < 0.15,
        starts_at=chance.choice((0.0, chance.uniform(0, until_s))),
        dialects=chance.choice(dialects),
        is_plain=is_plain,
        restlessness=max(chance.choice((0.0, 0.02, 0.1)), 0.5 * is_plain),
    )


def _step(chance: random.Random) -> Step:
    kind = chance.choice(KINDS)
    match kind:
        case "burst":
            return Step(kind, chance.choice((10, 100, 400)))
        case "wait":
            return Step(kind, 1, chance.choice((1.0, 20.0, 100.0)))
        case "flush":
            return Step(kind)
        case "ask":
            return Step(kind, chance.randint(1, 3), chance.choice((0.0, 3.0)))
        case _:
            return Step(kind, chance.randint(1, 30), chance.choice((0.0, 0.01, 0.5, 4.0)))
