"""The plan of one seed: the calls, the limits, and how often each fault occurs."""

import itertools
import random
from typing import Final

import msgspec

from streams.journal.sqlite.log import Budget
from streams.limits import Limits

# The `max` of calls that may be abandoned, and of all others.
BRIEF_S: Final = 30.0
LONG_S: Final = 7 * 86_400.0
FOREVER_S: Final = 1e9  # between two faults of a kind that does not occur
OFTEN_S: Final = 20.0  # between two faults of a kind that occurs often

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

# Short calls: they end at once, or about when the server stores their record.
SHORT_TOOLS: Final = ("quick", "quick", "reading", "repeating", "quick-lasting", "reading-lasting")
SHORT_S: Final = 0.01
# The moments in a short call at which, or shortly after which, a fault occurs.
MOMENTS: Final = ("arrived", "arrived", "asked", "durable", "announced", "answered")
FAULTS: Final = ("crash", "crash", "stop", "cut", "cut", "full")
WHIMS: Final = ("cancel", "again", "same id", "leave")  # of its caller


class Step(msgspec.Struct, frozen=True):
    """A tool's next step: send or report so many things, ask, flush, or wait so many seconds."""

    kind: str
    count: int = 1
    pause_s: float = 0.0  # before each of them


class Fate(msgspec.Struct, frozen=True):
    """A fault in one short call, `after_s` seconds after a moment of it."""

    moment: str
    after_s: float
    what: str


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
    is_short: bool = False
    is_keyed: bool = False  # by a short call's own caller; our client decides by itself
    fate: Fate | None = None

    @property
    def is_lasting(self) -> bool:
        """Whether its tool restarts after its server has died."""
        return self.tool.endswith("lasting")

    @property
    def is_repeatable(self) -> bool:
        """Whether the annotations of its tool say that it may run twice."""
        return self.tool.startswith(("reading", "repeating"))

    @property
    def said(self) -> int:
        """The number of its log messages."""
        return sum(step.count for step in self.steps if step.kind in ("say", "burst"))

    @property
    def asked(self) -> int:
        """The number of its questions."""
        return sum(step.count for step in self.steps if step.kind == "ask")


class Sharing(msgspec.Struct, frozen=True):
    """Several replicas on one store, and how often each fault occurs, in seconds on average."""

    replicas: int
    lease_s: float
    latency_s: float  # of the way to the store, and of the way back
    is_forgetful: bool  # the store may come back without its last changes
    kill_every_s: float  # a replica, as all of these
    stop_every_s: float
    pause_every_s: float
    cut_every_s: float  # off from the store
    still_every_s: float  # the store answers nothing
    restart_every_s: float  # the store
    failover_every_s: float  # to a server that has all, or is behind if the store is forgetful


class Plan(msgspec.Struct, frozen=True):
    """All choices that are made before the beginning."""

    seed: int
    journal: str  # "file", "memory" or "shared"
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
    sharing: Sharing | None = None  # one server after the other


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
        parts=(
            *(
                _part(chance, f"c{n}", 0.8 * chaos_s, may_be_plain=may_be_plain)
                for n in range(chance.randint(2, 7))
            ),
            *_short_parts(seed, 0.8 * chaos_s, may_be_plain=may_be_plain),
        ),
    )


def shared_plan_of(chance: random.Random, seed: int) -> Plan:
    """Draw the plan of a seed in which several replicas share a journal."""
    often = random.Random(f"replicas of {seed}")
    faults = [field for field in Sharing.__struct_fields__ if field.endswith("every_s")]
    some = often.sample(faults, often.choice((0, 1, 1, 2, 3, len(faults))))
    sharing = Sharing(
        replicas=often.choice((2, 3, 3, 4)),
        lease_s=often.choice((1.0, 2.0, 5.0)),
        latency_s=often.choice((0.0, 0.0005, 0.01)),
        is_forgetful=often.random() < 0.4,
        **{
            fault: often.choice((OFTEN_S, 60.0, 200.0)) if fault in some else FOREVER_S
            for fault in faults
        },
    )
    return msgspec.structs.replace(plan_of(chance, seed), journal="shared", sharing=sharing)


def lossless(first: int, count: int) -> list[int]:
    """The seeds from `first` on in which replicas share a store that loses nothing."""
    seeds = range(first, first + 4 * count)
    return [seed for seed in seeds if not _is_forgetful(seed)][:count]


def forgetful(first: int, count: int) -> list[int]:
    """The seeds from `first` on in which their store goes back, again and again."""
    found = (seed for seed in itertools.count(first) if _is_forgetful(seed, often=True))
    return list(itertools.islice(found, count))


def _is_forgetful(seed: int, *, often: bool = False) -> bool:
    sharing = shared_plan_of(random.Random(seed), seed).sharing
    assert sharing is not None
    troubles = min(sharing.restart_every_s, sharing.failover_every_s)
    return sharing.is_forgetful and (troubles <= OFTEN_S or not often)


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


def _short_parts(seed: int, until_s: float, *, may_be_plain: bool) -> list[Part]:
    """The short calls. They are drawn apart, so that the other choices of a seed stay the same."""
    chance = random.Random(f"short calls of {seed}")
    faults = chance.choice(((), ("cut",), FAULTS, FAULTS))
    return [
        _short_part(chance, f"s{n}", until_s, faults, may_be_plain=may_be_plain)
        for n in range(chance.choice((0, 10, 20, 30)))
    ]


def _short_part(
    chance: random.Random, key: str, until_s: float, faults: tuple[str, ...], *, may_be_plain: bool
) -> Part:
    is_ours = chance.random() < 0.4  # called by our client, which has positions
    dialects: list[tuple[str, ...]] = [()]
    if may_be_plain:
        dialects += [("streams",), ("resumableRequests",)]
    whats = faults if is_ours else (*faults, *WHIMS)
    fate = None
    if whats and chance.random() < 0.6:
        after_s = chance.choice((0.0, chance.uniform(0, 1.2 * SHORT_S)))
        what, moment = chance.choice(whats), chance.choice(MOMENTS)
        if what in WHIMS and chance.random() < 0.5:
            moment = "sent"  # by its caller: they arrive soon after each other
        fate = Fate(moment, after_s, what)
    return Part(
        key=key,
        tool=chance.choice(SHORT_TOOLS),
        steps=tuple(_short_step(chance) for _ in range(chance.choice((0, 0, 1, 1, 1, 2)))),
        fails=chance.random() < 0.1,
        starts_at=chance.uniform(0, until_s),
        dialects=chance.choice(dialects),
        is_plain=not is_ours,
        restlessness=0.0,
        is_short=True,
        is_keyed=may_be_plain and chance.random() < 0.6,
        fate=fate,
    )


def _short_step(chance: random.Random) -> Step:
    kind = chance.choice(("wait", "wait", "wait", "say", "report", "flush", "ask"))
    return Step(kind, 1, chance.choice((0.0, chance.uniform(0, SHORT_S), chance.uniform(0, 1.0))))


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
