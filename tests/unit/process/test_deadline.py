"""The last words of a process that ends at its deadline."""

import structlog

from streams.process.deadline import Exit


def test_the_last_words_name_tools_only_where_some_run() -> None:
    """Else it is another thread that has not ended, such as that of an exporter of telemetry."""
    end = Exit()
    with structlog.testing.capture_logs() as logged:
        end._tell(0)
        end.tools = lambda: ["build", "ship"]
        end._tell(0)
    alone, with_tools = logged
    assert "tools" not in alone["event"]
    assert "tools" not in alone
    assert "some tools have not ended" in with_tools["event"]
    assert with_tools["tools"] == "build, ship"
