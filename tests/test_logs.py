"""The library's log, as a program has it that imports the library and configures nothing."""

import sys

import pytest
import structlog

from streams.logs import log


def test_warnings_go_to_standard_error_and_nothing_to_standard_output(
    capfd: pytest.CaptureFixture[str],
) -> None:
    log.info("connected")
    log.warning("a tool gave up", tool="build")
    out, err = capfd.readouterr()
    assert out == ""
    assert "a tool gave up" in err
    assert "build" in err
    assert "connected" not in err


def test_an_exception_is_told_without_the_values_of_variables(
    capfd: pytest.CaptureFixture[str],
) -> None:
    secret = 0
    try:
        divmod(1, secret)
    except ZeroDivisionError:
        log.exception("a tool failed")
    err = capfd.readouterr().err
    assert "ZeroDivisionError" in err
    assert "secret = 0" not in err


def test_the_application_decides(capfd: pytest.CaptureFixture[str]) -> None:
    structlog.configure(
        processors=[structlog.processors.KeyValueRenderer(key_order=["event"])],
        logger_factory=structlog.WriteLoggerFactory(sys.stdout),
    )
    log.info("connected", server="x")
    assert capfd.readouterr().out == "event='connected' server='x'\n"
