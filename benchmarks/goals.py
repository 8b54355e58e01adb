"""The goals, and how far each is reached: ratios of medians, computed from one run."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from benchmarks.harness import Results
from benchmarks.memory import OURS_HTTP, OURS_WEBSOCKET, STOCK
from benchmarks.suites import (
    append,
    calls,
    frames,
    latency,
    live,
    memory,
    mixed,
    replicas,
    resume,
    scale,
    storm,
    wrapped,
)
from benchmarks.suites.peers import SDK_CLIENT

REDIS_PARSED: Final = "Redis: hiredis"
# Our client is compared over one transport, and with results of the same kind as the other's:
# parsed messages, like the SDK's, or the bytes of each, like hiredis's.
OUR_CLIENT: Final = resume.in_hand(resume.WEBSOCKET)
OUR_RUNS: Final = resume.by_runs(resume.WEBSOCKET)

NOT_MEASURED: Final = "not measured"


class Goal(NamedTuple):
    """A row compared with another of its suite and size, or by itself where `of` is empty.

    `is_ceiling` where less is better.
    """

    what: str
    suite: str
    row: str
    of: str
    size: int
    bound: float
    is_ceiling: bool = False


class Verdict(NamedTuple):
    """The value reached, in the row's unit where the goal is no ratio; or a word in its place."""

    goal: Goal
    reached: float = 0.0
    unit: str = ""
    word: str = ""

    @property
    def is_met(self) -> bool:
        """Whether it was measured and reaches its goal."""
        if self.word:
            return False
        goal = self.goal
        return self.reached <= goal.bound if goal.is_ceiling else self.reached >= goal.bound


def _each(
    what: str, suite: str, row: str, of: str, bounds: tuple[float, float], *, at_most: bool = False
) -> Iterator[Goal]:
    """The same goal for small messages and for large ones."""
    for size, bound in zip((200, 4096), bounds, strict=True):
        yield Goal(what, suite, row, of, size, bound, at_most)


def _raw(transport: str, small: float, large: float) -> Iterator[Goal]:
    limit = resume.RAW_READERS[transport][0]
    what = f"resume, raw client, {transport} over {limit.removeprefix('limit: ')}"
    return _each(what, "resume", resume.raw_row(transport), limit, (small, large))


def _live(streams: str) -> Iterator[Goal]:
    what = f"live, journaled over no journal, {streams}"
    return _each(what, "live", live.journaled(streams), live.bare(streams), (0.55, 0.7))


def _latency(journal: str, most: float) -> Iterator[Goal]:
    what = f"live latency p50 at 1,000 messages/s, {journal} over no journal"
    of = latency.row(latency.NONE, 50)
    return _each(what, "latency", latency.row(journal, 50), of, (most, most), at_most=True)


def _attached(kind: str, most: float) -> Goal:
    name, of = memory.NAMES[kind], memory.NAMES[STOCK]
    return Goal(f"memory, {name} over Python SDK's", "memory", name, of, 0, most, is_ceiling=True)


def _calls(
    cell: str, of: str, in_flight: int, column: str, bound: float, *, at_most: bool = False
) -> Goal:
    """Two lines of the suite `calls`, with as many calls in flight."""
    row, other = (calls.row(name, in_flight, column) for name in (cell, of))
    return Goal(f"short calls, {row} over {of}", "calls", row, other, 0, bound, at_most)


def _lone(transport: str, most: float) -> Goal:
    bare = calls.ours(transport, calls.NO_JOURNAL, calls.MESSAGE)
    durable = calls.ours(transport, calls.DURABLE, calls.MESSAGE)
    return _calls(durable, calls.after(bare), 1, calls.P50, most, at_most=True)


def _wrapped(what: str, row: str, of: str, bound: float, *, at_most: bool = False) -> Goal:
    return Goal(f"wrapped, {what}", "wrapped", row, of, 0, bound, at_most)


def _on_a_store() -> Iterator[Goal]:
    """Three replicas on one machine's store."""
    what, row = "replicas, durable messages/s over 3 of them", replicas.durable(replicas.THREE)
    yield from _each(what, "replicas", row, "", (20_000, 20_000))
    for where in (replicas.OWNER, replicas.OTHER):
        row = replicas.tail(where, 99)
        yield from _each(f"replicas, {row}, ms", "replicas", row, "", (25, 25), at_most=True)
        row = replicas.raw_row(where)
        for limit in (replicas.XRANGE, replicas.LRANGE):
            what = f"replicas, {row}, over {limit.removeprefix('limit: ')}"
            yield from _each(what, "replicas", row, limit, (0.6, 0.6))


def _beside(peer: str) -> Goal:
    """Our rate over that of another proxy, over HTTP with 32 calls in flight."""
    ours, theirs = (
        wrapped.row(wrapped.FAST, way, 32, calls.RATE)
        for way in (wrapped.WRAPS[calls.HTTP], f"{peer}, HTTP")
    )
    return _wrapped(f"32 at once over HTTP, calls/s over {peer}", ours, theirs, 5)


_WRAP_STDIO: Final = wrapped.WRAPS[calls.STDIO]

_HTTP_CALLS: Final = calls.ours(calls.HTTP, calls.DURABLE)

GOALS: Final = (
    *_raw(resume.STDIO, 0.75, 0.75),
    *_raw(resume.WEBSOCKET, 0.75, 0.75),
    *_raw(resume.HTTP, 0.75, 0.75),
    *_raw(resume.EVENTS, 0.15, 0.30),
    *_each("resume, our client over Python SDK's", "resume", OUR_CLIENT, SDK_CLIENT, (60, 12)),
    *_each(
        "resume, our client over Redis parsed by hiredis",
        "resume",
        OUR_RUNS,
        REDIS_PARSED,
        (3, 1.5),
    ),
    *_each(
        "resume, raw client, one message a frame over a `send_message` loop",
        "frames",
        resume.raw_row(frames.TRANSPORT),
        frames.PLAIN_RAW,
        (3, 3),
    ),
    *_live(live.ONE),
    *_live(live.MANY),
    *_latency(latency.POWER, 3.0),
    *_latency(latency.PROCESS, 1.5),
    _calls(_HTTP_CALLS, calls.SDK_EVENTS, 32, calls.RATE, 5),
    _calls(_HTTP_CALLS, calls.SDK_JSON, 32, calls.RATE, 3),
    _calls(_HTTP_CALLS, calls.SDK_EVENTS, 1, calls.P50, 0.7, at_most=True),
    _calls(_HTTP_CALLS, calls.SDK_JSON, 1, calls.P50, 1, at_most=True),
    _calls(_HTTP_CALLS, calls.BARE, 32, calls.CPU, 3, at_most=True),
    *(
        _calls(calls.ours(transport, calls.DURABLE), calls.SDK_STDIO, 32, calls.RATE, 8)
        for transport in (calls.WEBSOCKET, calls.STDIO)
    ),
    *(
        _calls(calls.GROWN + more, calls.EMPTY + more, 32, calls.RATE, 0.95)
        for more in ("", f", {calls.MESSAGE}")
    ),
    _lone(calls.HTTP, 1.5),
    _lone(calls.STDIO, 1.5),
    Goal(
        "short calls, p99, beside a resume of 100,000 messages over without",
        "mixed",
        mixed.row(mixed.MEANWHILE, calls.P99),
        mixed.row(mixed.ALONE, calls.P99),
        0,
        2,
        is_ceiling=True,
    ),
    _wrapped(
        "1 at once over stdio, p50 over the bare server, Python SDK",
        wrapped.row(wrapped.SDK, _WRAP_STDIO, 1, calls.P50),
        wrapped.row(wrapped.SDK, wrapped.BARE, 1, calls.P50),
        1.5,
        at_most=True,
    ),
    _wrapped(
        "live over stdio, messages/s over the child's own pipe",
        wrapped.live(_WRAP_STDIO),
        wrapped.live(wrapped.BARE),
        0.7,
    ),
    _beside("supergateway"),
    _beside("mcp-proxy"),
    _wrapped(
        "live over HTTP, messages/s over supergateway",
        wrapped.live(wrapped.WRAPS[calls.HTTP]),
        wrapped.live("supergateway, HTTP"),
        5,
    ),
    Goal("append, over rowid + index", "append", append.OURS, append.PLAIN, 200, 6),
    Goal("append, commit p99", "append", append.COMMIT_P99, "", 200, 5, is_ceiling=True),
    Goal("append, largest WAL", "append", append.WAL, "", 200, 64, is_ceiling=True),
    Goal(
        "append, at 10 million messages over at 1 million",
        "append",
        append.OURS_AT_MANY,
        append.OURS,
        200,
        0.8,
    ),
    Goal(
        "10 million streams, restart to serving", "scale", scale.RESTART, "", 0, 2, is_ceiling=True
    ),
    Goal(
        "10 million streams, restart, over that of a tenth",
        "scale",
        scale.RESTART,
        scale.RESTART_OF_A_TENTH,
        0,
        2,
        is_ceiling=True,
    ),
    Goal(
        "10 million streams, memory for each",
        "scale",
        scale.STREAM_BYTES,
        "",
        0,
        24,
        is_ceiling=True,
    ),
    Goal("1,000 come back, SSE, over Python SDK", "storm", storm.OURS, storm.STOCK, 200, 40),
    Goal(
        "1,000 come back, WebSocket, over Python SDK",
        "storm",
        storm.OURS_WEBSOCKET,
        storm.STOCK,
        200,
        40,
    ),
    *_on_a_store(),
    _attached(OURS_HTTP, 0.6),
    _attached(OURS_WEBSOCKET, 0.8),
)


def verdicts(results: Results) -> list[Verdict]:
    """One verdict for each goal."""
    return [verdict(goal, results) for goal in GOALS]


def verdict(goal: Goal, results: Results) -> Verdict:
    """How far a goal is reached."""
    row = results.row(goal.suite, goal.row, goal.size)
    of = results.row(goal.suite, goal.of, goal.size) if goal.of else None
    for needed in (row, of) if goal.of else (row,):
        if needed is None:
            return Verdict(goal, word=NOT_MEASURED)
        if needed.failed:
            return Verdict(goal, word=needed.failed)
    assert row is not None
    if of is None:
        return Verdict(goal, row.median, row.unit)
    return Verdict(goal, row.median / of.median)
