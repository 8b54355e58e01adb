"""What is measured, in the order in which it is done."""

from typing import Final

from benchmarks.harness import Suite
from benchmarks.suites import frames, latency, live, resume

SUITES: Final = {
    suite.name: suite
    for suite in (
        Suite("resume", "Coming back: messages a second", resume.opened),
        Suite("frames", "One message a WebSocket frame: messages a second", frames.opened),
        Suite("live", "While the tool sends: messages a second", live.opened),
        Suite("latency", "1,000 messages a second: how long each takes", latency.opened),
    )
}
