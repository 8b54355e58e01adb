"""The library's log, as a program has it that imports the library and configures nothing."""

import logging
import os
import sys
from contextlib import suppress

import pytest
import structlog

from streams.keys import Keyring, new_bearer, new_id
from streams.logs import CONTROLS, log, log_to_stderr, redacted, settings


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


@pytest.mark.parametrize("is_configured", [False, True])
def test_a_terminal_that_is_gone_ends_nothing(
    is_configured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = os.openpty()
    terminal = os.fdopen(theirs, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", terminal)
    if is_configured:
        log_to_stderr()
    os.close(ours)
    try:
        with pytest.raises(OSError, match="Input/output"):
            print("a bare line", file=terminal)
        log.warning("a tool gave up")
        log.error("another one, too")
    finally:
        structlog.reset_defaults()
        with suppress(OSError):
            terminal.close()


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


@pytest.mark.parametrize("as_json", [False, True])
def test_what_a_peer_says_controls_no_terminal_and_begins_no_line(
    capfd: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    structlog.configure(
        **settings(logging.INFO, as_json=as_json),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    said = "a\x1b[2J\x7f\x9b\u202e\u2028\u2066\u200f\ud800\n2026-01-01 [info] forged"
    log.warning(f"event {said}", error=said, several=[said])
    try:
        int(said)
    except ValueError:
        log.exception("a handler failed")
    err = capfd.readouterr().err
    assert not CONTROLS.search(err)
    assert err.splitlines()[0].count("forged") == 3
    assert not err.splitlines()[1].startswith("2026-01-01 [info] forged")


def test_the_application_decides(capfd: pytest.CaptureFixture[str]) -> None:
    structlog.configure(
        processors=[structlog.processors.KeyValueRenderer(key_order=["event"])],
        logger_factory=structlog.WriteLoggerFactory(sys.stdout),
    )
    log.info("connected", server="x")
    assert capfd.readouterr().out == "event='connected' server='x'\n"


SECRETS = (new_bearer(), new_id(), Keyring.load(None).page_token(new_id(), 7, b"x" * 32))


@pytest.mark.parametrize(
    "secret",
    [*SECRETS, "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhIn0.c2ln"],
    ids=["bearer", "stream", "page", "jwt"],
)
@pytest.mark.parametrize(
    "line",
    [
        "Authorization: Bearer {}",
        "No method 'no/such/{}' here",
        '{{"resumeToken": "{}"}}',
        r"{{\"params\": {{\"nextResumeToken\": \"{}\"}}}}",
        "headers={{'mcp-session-id': '{}'}}",
        "-{}-",
        "resumed {}",
    ],
)
def test_secrets_are_struck_out_by_their_looks(line: str, secret: str) -> None:
    assert secret not in redacted(None, "", line.format(secret))
    assert secret[:-3] not in redacted(None, "", line.format(secret[:-3]))


@pytest.mark.parametrize(
    "line",
    [
        "Authorization: Basic dXNlcjpwYXNzd29yZA==",
        "(b'authorization', b'Bearer short-one')",
        '{"resumeToken":"short-one"}',
    ],
)
def test_secrets_are_struck_out_by_their_names(line: str) -> None:
    assert "[redacted]" in redacted(None, "", line)
    assert "short-one" not in redacted(None, "", line)
    assert "dXNlcjpwYXNzd29yZA" not in redacted(None, "", line)


@pytest.mark.parametrize(
    "line",
    [
        "test_a_stream_is_its_bearers_over_every_transport",
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "principal=bearer(tokens, ada)",
        "Send a bearer token.",
        "url=https://mcp.example.com:8080/mcp",
    ],
)
def test_what_is_no_secret_stays(line: str) -> None:
    assert redacted(None, "", line) == line


def test_the_log_itself_strikes_secrets_out(capfd: pytest.CaptureFixture[str]) -> None:
    secret = new_bearer()
    try:
        int(secret)
    except ValueError:
        log.exception("a tool failed", given=secret)
    assert secret not in capfd.readouterr().err
