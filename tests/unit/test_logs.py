"""The library's log, as a program has it that imports the library and configures nothing."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import structlog

from streams import logs
from streams.clock import steady
from streams.keys import Keyring, new_bearer, new_id
from streams.logs import (
    CONTROLS,
    EXCEPTION_BYTES_MAX,
    STANDARD_ERROR,
    WAITING_BYTES_MAX,
    log,
    log_to_stderr,
    redacted,
    settings,
)


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


def test_the_user_and_the_password_in_the_url_of_a_store_are_struck_out() -> None:
    line = "no answer (url=redis://u:p@ss@h:1/0), 'x+REDISS://:p@h' and redis://h but unix://u@/s"
    told = "no answer (url=redis://h:1/0), 'x+REDISS://h' and redis://h but unix:///s"
    assert redacted(None, "", line) == told


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


@pytest.fixture
def json_lines() -> Iterator[None]:
    log_to_stderr(as_json=True)
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("json_lines")
@pytest.mark.parametrize(
    "said",
    [
        "authorization=é12345678",
        "é" + "aB" * 23,
        "authorization:\tabcdefghij",
        'bearer "\\x12345678',
    ],
)
def test_a_line_of_json_is_one_also_without_its_secrets(
    capfd: pytest.CaptureFixture[str], said: str
) -> None:
    several = [{said: (said, said.encode())}]
    log.exception(said, exc_info=ValueError(said), tool=said, several=several, share=float("nan"))
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line)["share"] == "nan"


@pytest.mark.usefixtures("json_lines")
def test_values_within_values_are_redacted(capfd: pytest.CaptureFixture[str]) -> None:
    secret = new_bearer()
    log.warning(
        "x", a=[{"b": (secret, secret.encode())}], c={"Authorization": "Basic dXNlcjpwYXNz"}
    )
    line = capfd.readouterr().err
    assert secret not in line
    assert "dXNlcjpwYXNz" not in line
    assert json.loads(line)["c"] == {"Authorization": "Basic [redacted]"}


FORGED = "2026-01-01T00:00:00.000Z [warning  ] forged"


@pytest.mark.parametrize("text", [f"\n{FORGED}" * 9, f"\n{FORGED}" * 9_000, FORGED * 9_000])
def test_an_exception_forges_no_line_and_is_bounded(
    capfd: pytest.CaptureFixture[str], text: str
) -> None:
    log.exception("a tool failed", exc_info=ValueError(text))
    told = capfd.readouterr().err
    first, *others = told.splitlines()
    assert "a tool failed" in first
    assert all(line.startswith("    ") for line in others)
    assert len(told) < EXCEPTION_BYTES_MAX + 200
    assert ("left out" in told) is (len(text) > EXCEPTION_BYTES_MAX)


def test_of_a_long_exception_only_what_is_written_is_escaped(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at, original = [], logs.escaped

    def escaped(text: str) -> str:
        looked_at.append(text)
        return original(text)

    monkeypatch.setattr("streams.logs.escaped", escaped)
    text = "first" + "\x1b" * 1_000_000 + "last"
    log.exception("a tool failed", exc_info=ValueError(text))
    told = capfd.readouterr().err
    assert sum(map(len, looked_at)) < 3 * EXCEPTION_BYTES_MAX
    assert all(each in told for each in ("first", "left out", "last"))


def test_a_secret_at_the_cut_is_redacted(capfd: pytest.CaptureFixture[str]) -> None:
    for before in range(EXCEPTION_BYTES_MAX // 2 - 150, EXCEPTION_BYTES_MAX // 2, 8):
        words = "x " * (before // 2)
        said = f"{words}bearer abcdefghijkl {words * 3} bearer abcdefghijkl {words}"
        log.exception("a tool failed", exc_info=ValueError(said))
        told = capfd.readouterr().err
        assert "defghi" not in told
        assert "left out" in told


@contextmanager
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Standard error is a pipe; its other end."""
    ours, theirs = os.pipe()
    with os.fdopen(theirs, "w") as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        yield ours
        with suppress(OSError):
            os.close(ours)
        STANDARD_ERROR.finish(9.0)
        monkeypatch.undo()


def _read_until(fd: int, end: bytes) -> bytes:
    said = b""
    while end not in said:
        said += os.read(fd, 1 << 16)
    return said


def test_a_pipe_that_is_not_read_holds_up_nothing_and_keeps_the_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with unread(monkeypatch) as ours:
        for number in range(20):
            log.warning("a long line", number=number, text="x" * 20_000)
        log.warning("the last line")
        assert STANDARD_ERROR.is_waiting
        lines = _read_until(ours, b"the last line").decode().splitlines()
        assert [line.count("x") >= 20_000 for line in lines] == [True] * 20 + [False]
        assert [f"number={number}" in line for number, line in enumerate(lines[:-1])] == [True] * 20


def test_lines_beyond_the_limit_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with unread(monkeypatch) as ours:
        for _ in range(60):
            log.warning("a long line", text="x" * (WAITING_BYTES_MAX // 40))
        said = _read_until(ours, b"standard error was not read")
        said += b"" if b"lines=" in said else _read_until(ours, b"lines=")
        lost = 60 - said.count(b"a long line")
        assert lost > 10
        assert f"lines={lost}".encode() in said


def test_a_reader_that_goes_frees_the_lines_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with unread(monkeypatch) as ours:
        for _ in range(20):
            log.warning("a long line", text="x" * 20_000)
        assert STANDARD_ERROR.is_waiting
        os.close(ours)
        STANDARD_ERROR.finish(9.0)
        assert not STANDARD_ERROR.is_waiting


LOGS_MUCH = """
from streams.logs import log
for _ in range(20):
    log.warning("a long line", text="x" * 20_000)
log.warning("the last line")
"""


def test_the_end_of_the_process_writes_the_lines_that_wait() -> None:
    told = subprocess.run([sys.executable, "-c", LOGS_MUCH], stderr=subprocess.PIPE, check=True)
    assert told.stderr.count(b"a long line") == 20
    assert b"the last line" in told.stderr


A_LIBRARY_LOGS = """
import logging, warnings
from streams.logs import log_to_stderr
log_to_stderr(as_json=True, levels={"quiet": logging.ERROR})
logging.getLogger("exporter.grpc").warning("retrying in %s s", 2)
logging.getLogger("exporter.grpc").info("connected")
logging.getLogger("quiet").warning("not told")
logging.getLogger("wrong").warning("%s is %d", 2)
warnings.warn("never awaited", RuntimeWarning)
try:
    raise ValueError("a fault")
except ValueError:
    logging.getLogger("exporter").exception("failed")
"""


def test_what_libraries_log_is_in_lines_of_this_log() -> None:
    """Else a log of JSON lines would have others, which its reader cannot parse."""
    told = subprocess.run(
        [sys.executable, "-c", A_LIBRARY_LOGS], stderr=subprocess.PIPE, check=True, text=True
    )
    first, wrong, warned, second = map(json.loads, told.stderr.splitlines())
    assert (first["logger"], first["level"]) == ("exporter.grpc", "warning")
    assert first["event"] == "retrying in 2 s"
    assert wrong["event"].startswith("a line of the log cannot be formatted: TypeError (<string>:")
    assert warned["event"] == "RuntimeWarning: never awaited"
    assert (second["event"], second["level"]) == ("failed", "error")
    assert "ValueError: a fault" in second["exception"]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_standard_error_that_was_never_open_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, *, as_json: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    log_to_stderr(as_json=as_json)
    try:
        log.warning("a tool gave up")
    finally:
        structlog.reset_defaults()
    assert not STANDARD_ERROR.is_waiting


@pytest.mark.parametrize(
    "text", [each * 50_000 for each in ("a-a-", "A-A-", "a a ", "redis+", "redis://")]
)
def test_long_words_are_searched_in_a_moment(text: str) -> None:
    began_at = steady()
    redacted(None, "", text)
    assert steady() - began_at < 20  # it was minutes


def test_the_command_starts_with_a_closed_standard_error() -> None:
    code = (
        "import os, sys; from streams.cli import main; sys.argv[1:] = ['--help']\n"
        "try: main()\n"
        "finally: print(os.readlink('/proc/self/fd/2'), sys.stderr.name)"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert told.stdout.endswith("/dev/null /dev/null\n")
