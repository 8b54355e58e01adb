"""The suites, in the order of measurement."""

from typing import Final

from benchmarks.harness import Suite
from benchmarks.suites import (
    append,
    calls,
    frames,
    latency,
    live,
    memory,
    mixed,
    replicas,
    replicas_idle,
    resume,
    scale,
    storm,
    wrapped,
)

SUITES: Final = {
    suite.name: suite
    for suite in (
        Suite("resume", "Coming back: messages a second", resume.opened),
        Suite(
            "frames", "One message a WebSocket frame: messages a second", frames.opened, rounds=3
        ),
        Suite("live", "While the tool sends: messages a second", live.opened, rounds=3),
        Suite("latency", "1,000 messages a second: how long each takes", latency.opened, rounds=3),
        Suite(
            "calls",
            "Short calls: calls a second, the time of each, and CPU time",
            calls.opened,
            rounds=3,
            warms_up=False,
            columns=tuple(calls.COLUMNS),
        ),
        Suite(
            "mixed",
            "Short calls beside 1,000 idle streams, 50 live ones and a resume",
            mixed.opened,
            rounds=3,
            warms_up=False,
            columns=mixed.COLUMNS,
        ),
        Suite(
            "wrapped",
            "A server of stdio behind `mcp-streams wrap`, and behind other proxies",
            wrapped.opened,
            rounds=3,
            warms_up=False,
            columns=wrapped.COLUMNS_SHOWN,
        ),
        Suite(
            "append",
            "1,000 streams appended to in turn",
            append.opened,
            rounds=1,
            warms_up=False,
        ),
        Suite(
            "scale",
            "10 million idle streams, a message each",
            scale.opened,
            rounds=1,
            warms_up=False,
        ),
        Suite("storm", "1,000 clients come back at once: resumes a second", storm.opened, rounds=2),
        Suite(
            "memory",
            "Memory of a connection that is attached and idle",
            memory.opened,
            rounds=2,
            warms_up=False,
        ),
        Suite("replicas", "Replicas that share a store", replicas.opened),
        Suite(
            "replicas-idle",
            "100,000 idle streams of a message, in a store and in a file",
            replicas_idle.opened,
            rounds=1,
            warms_up=False,
        ),
    )
}
