"""Files and sockets that another user of the machine has planted.

Each process refuses them in one line, and hands nothing over.
"""

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from streams.protocol.ticket import Ticket
from tests.rigs.command import run
from tests.rigs.needing import another_user
from tests.wire.process import APP, CLI, ServerProcess

pytestmark = pytest.mark.needs_file("other users have planted files")

NEAR = "127.0.0.1:0"
INITIALIZE = (
    b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25",'
    b'"capabilities":{},"clientInfo":{"name":"secret client","version":"0"}}}\n'
)
RELAY = ("serve", APP, "--stdio", "--journal")


def refused(*words: str | Path) -> str:
    """The reason why a command ends: one line, and exit code 2."""
    done = run(*map(str, words))
    assert (done.returncode, done.stdout) == (2, ""), done
    assert len(done.shown) == 1, done.stderr
    return done.shown[0]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A journal with its keys, which was served once."""
    path = tmp_path / "journal.db"
    run("serve", APP, "--stdio", "--foreground", "--journal", str(path))
    return path


# The socket between relay and owner

LISTEN = """
import os, socket, sys

os.setgid(65534); os.setuid(65534)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
listener.listen()
print("listening", flush=True)
taken, _ = listener.accept()
data, fds, _, _ = socket.recv_fds(taken, 4096, 2)
print(len(data), len(fds), flush=True)
"""


@contextmanager
def listening_as_another(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of another user, which accepts connections from relays."""
    another_user()
    command = [sys.executable, "-c", LISTEN, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp: all users may create files there."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


def test_a_relay_hands_nothing_to_another_users_process(shared: Path) -> None:
    journal = shared / "journal.db"
    with listening_as_another(Path(f"{journal}.sock")) as listener:
        relay = subprocess.run(
            [*CLI, *RELAY, str(journal)], input=INITIALIZE, capture_output=True, check=False
        )
        assert (relay.returncode, relay.stdout) == (2, b"")
        [line] = relay.stderr.decode().splitlines()
        assert f"{journal}.sock belongs to" in line
        assert "remove it." in line
        assert listener.poll() is None, "it still waits for the first one to connect"
    assert [path.name for path in shared.iterdir()] == ["journal.db.sock"]


def test_a_relay_asks_who_listens_before_it_hands_anything_over(shared: Path) -> None:
    """The socket file belongs to us, but the other user's process listens on it."""
    journal = shared / "journal.db"
    path = Path(f"{journal}.sock")
    with listening_as_another(path) as listener:
        os.chown(path, os.getuid(), -1)
        path.chmod(0o600)
        relay = subprocess.run(
            [*CLI, *RELAY, str(journal)], input=INITIALIZE, capture_output=True, check=False
        )
        assert (relay.returncode, relay.stdout) == (2, b"")
        [line] = relay.stderr.decode().splitlines()
        assert f"The process that listens at {path} belongs to uid 65534 and not to uid 0" in line
        assert listener.stdout is not None
        assert listener.stdout.readline() == "0 0\n", "neither a hello nor a descriptor"


# Each file, and each command


@pytest.mark.parametrize("suffix", ["", ".key", ".log", ".lock", ".sock", "-wal", "-shm"])
def test_what_another_user_planted_is_refused(tmp_path: Path, journal: Path, suffix: str) -> None:
    planted = Path(f"{journal}{suffix}")
    if suffix == ".sock":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(planted))
    planted.touch()
    os.chown(planted, another_user(), -1)
    for command in ((*RELAY, journal), ("serve", APP, "--http", NEAR, "--journal", journal)):
        why = refused(*command)
        assert f"{planted} belongs to nobody (uid 65534) and not to root (uid 0)" in why
        assert f"chown -h 0 {planted}" in why
    assert planted.lstat().st_uid == another_user(), "and it is left alone"


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
def test_a_second_name_of_a_file_that_sqlite_writes_is_refused(
    tmp_path: Path, journal: Path, suffix: str
) -> None:
    precious, planted = tmp_path / "precious", Path(f"{journal}{suffix}")
    if suffix:
        precious.write_bytes(b"precious")
        planted.unlink(missing_ok=True)
        planted.hardlink_to(precious)
    else:
        precious.hardlink_to(journal)
    before = precious.read_bytes()
    for command in ((*RELAY, journal), ("serve", APP, "--ws", NEAR, "--journal", journal)):
        why = refused(*command)
        assert f"{planted} is one of 2 hard links to a file" in why
        assert f"find . -xdev -samefile {planted}" in why
    assert precious.read_bytes() == before


@pytest.mark.parametrize("suffix", [".key", ".log", ".lock", ".sock", "-wal"])
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, journal: Path, suffix: str, kind: str
) -> None:
    planted = Path(f"{journal}{suffix}")
    planted.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(planted, 0o600)
    else:
        planted.symlink_to(tmp_path / "elsewhere")
    how = RELAY if kind == "pipe" else ("serve", APP, "--ws", NEAR, "--journal")
    why = refused(*how, journal)
    assert str(planted) in why
    assert "a named pipe" in why or "a symbolic link" in why
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_in_which_others_may_write_is_refused_by_every_command(
    tmp_path: Path, journal: Path, tokens: Path, mode: int
) -> None:
    another_user()
    tmp_path.chmod(mode)
    elsewhere = tmp_path / "elsewhere"
    for command in (
        (*RELAY, journal),
        ("serve", APP, "--foreground", "--journal", journal),
        ("serve", APP, "--http", NEAR, "--journal", journal),
        ("verify", journal),
        ("export", journal),
        ("backup", journal, elsewhere),
        ("token", "new", "ada", "--file", tokens),
        ("token", "new", "ada", "--file", tokens, "--to", elsewhere),
        ("token", "list", "--file", tokens),
        ("serve", APP, "--http", NEAR, "--auth-tokens", tokens),
    ):
        why = refused(*command)
        assert f"the folder {tmp_path} (mode {mode:04o}): run chmod go-w {tmp_path}" in why
    assert not elsewhere.exists()
    tmp_path.chmod(0o1777)
    assert run("verify", str(journal)).returncode == 0, "as in /tmp"


@pytest.mark.parametrize("suffix", ["", "-wal", ".key"])
def test_who_looks_at_a_journal_refuses_what_was_planted(
    tmp_path: Path, journal: Path, suffix: str
) -> None:
    planted = Path(f"{journal}{suffix}")
    planted.touch()
    os.chown(planted, another_user(), -1)
    for command in (
        ("verify", journal),
        ("export", journal),
        ("backup", journal, tmp_path / "copy", "--with-keys"),
    ):
        assert f"{planted} belongs to" in refused(*command)


AS_ANOTHER = """
import os, sys
import streams.cli.actions.operators
from streams.cli import operators

os.setgid(65534); os.setuid(65534)
sys.exit(getattr(operators, sys.argv[1])(sys.argv[2]))
"""


def test_another_user_is_not_told_that_no_server_runs(shared: Path) -> None:
    """The journal's server lives, but this user may neither ask it nor read the journal."""
    another_user()
    with ServerProcess(shared) as server:
        for words in ("drain", "ls", "stats"):
            command = [sys.executable, "-c", AS_ANOTHER, words, str(server.journal)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout) == (2, ""), done
            assert "another user owns it: run this as that user" in done.stderr, done


def test_keys_that_others_may_read_are_refused_in_one_sentence(journal: Path) -> None:
    keys = Path(f"{journal}.key")
    keys.chmod(0o644)
    for command in ((*RELAY, journal), ("serve", APP, "--ws", NEAR, "--journal", journal)):
        assert f"{keys} (mode 0644): run chmod 600 {keys}" in refused(*command)


# Tokens, TLS keys, and the callbook


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.jsonl"
    run("token", "new", "ada", "--file", str(path))
    return path


def test_tokens_of_another_user_are_refused(tokens: Path) -> None:
    os.chown(tokens, another_user(), -1)
    for command in (
        ("serve", APP, "--http", NEAR, "--auth-tokens", tokens),
        ("token", "new", "eve", "--file", tokens),
        ("token", "list", "--file", tokens),
        ("token", "revoke", "ada", "--file", tokens),
    ):
        assert f"{tokens} belongs to nobody" in refused(*command)


def test_tokens_that_are_a_pipe_are_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "tokens.jsonl"
    os.mkfifo(pipe, 0o600)
    assert "a named pipe" in refused("serve", APP, "--http", NEAR, "--auth-tokens", pipe)
    assert "a named pipe" in refused("token", "list", "--file", pipe)
    assert "a named pipe" in refused("call", "http://127.0.0.1:1", "t", "--token-file", pipe)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o666])
def test_a_token_that_others_may_read_is_shown_to_no_server(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "ada.token"
    path.write_text("mcps_secret")
    path.chmod(mode)
    url = "http://127.0.0.1:1/mcp"
    for command in (
        ("call", url, "tool"),
        ("pages", url, "tool"),
        ("resume", url, str(Ticket("stream", "token", 1))),
        ("poll", url, "stream"),
        ("poll", url, "--all"),
    ):
        why = refused(*command, "--token-file", path)
        assert f"{path} (mode {mode:04o}): run chmod 600 {path}" in why
        assert "mcps_secret" not in why


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate and its key, in files of their own."""
    issued = trustme.CA().issue_cert("localhost")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_bytes(issued.cert_chain_pems[0].bytes())
    key.touch(0o600)
    key.write_bytes(issued.private_key_pem.bytes())
    return certificate, key


def test_a_tls_key_that_others_may_read_is_refused(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    certificate, key = pair
    serve = ("serve", APP, "--http", NEAR, "--tls-cert")
    for mode in (0o644, 0o640, 0o660):
        key.chmod(mode)
        why = refused(*serve, certificate, "--tls-key", key)
        assert f"{key} (mode {mode:04o}): run chmod 600 {key}" in why
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    both.chmod(0o644)
    assert f"run chmod 600 {both}" in refused(*serve, both)


def test_a_tls_key_of_another_user_is_refused(pair: tuple[Path, Path]) -> None:
    certificate, key = pair
    os.chown(key, another_user(), -1)
    why = refused("serve", APP, "--ws", NEAR, "--tls-cert", certificate, "--tls-key", key)
    assert f"{key} belongs to nobody" in why


def test_a_key_set_that_others_may_change_is_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": []}')
    keys.chmod(0o666)
    issuer = ("--auth-issuer", "https://issuer.example.com", "--auth-audience", "here")
    why = refused("serve", APP, "--http", NEAR, "--auth-jwks", keys, *issuer)
    assert f"{keys} (mode 0666): run chmod 600 {keys}" in why


def test_a_callbook_of_another_user_is_refused(callbook_path: Path) -> None:
    callbook_path.parent.mkdir(mode=0o700)
    callbook_path.write_bytes(b"")
    os.chown(callbook_path, another_user(), -1)
    assert f"{callbook_path} belongs to nobody" in refused("calls")
    assert f"{callbook_path} belongs to nobody" in refused("resume", "tool-1")
    callbook_path.unlink()
    os.chown(callbook_path.parent, another_user(), -1)
    assert f"The folder {callbook_path.parent} belongs to nobody" in refused("calls")


# Tokens that are made


def test_a_token_is_written_to_a_new_private_file_and_not_printed(tmp_path: Path) -> None:
    to, tokens = tmp_path / "ada.token", tmp_path / "tokens.jsonl"
    before = os.umask(0)
    try:
        made = run("token", "new", "ada", "--file", str(tokens), "--to", str(to))
    finally:
        os.umask(before)
    assert (made.returncode, made.stderr) == (0, "")
    assert str(to) in made.stdout
    secret = to.read_text()
    assert secret.startswith("mcps_")
    assert secret.strip() not in made.stdout
    assert stat.S_IMODE(to.stat().st_mode) == 0o600
    told = run("token", "new", "ada", "--file", str(tokens), "--to", f"{to}2", "--json")
    assert '"to"' in told.stdout
    assert "mcps_" not in told.stdout
    assert len(tokens.read_text().splitlines()) == 2


def test_a_token_is_never_written_over_another_file(tmp_path: Path) -> None:
    to, tokens = tmp_path / "ada.token", tmp_path / "tokens.jsonl"
    new = ("token", "new", "ada", "--file", tokens, "--to")
    to.write_text("precious")
    assert f"{to} exists already" in refused(*new, to)
    assert to.read_text() == "precious"
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert "exists already" in refused(*new, tmp_path / "link")
    assert "exists already" in refused(*new, "/dev/stdout")
    assert f"{tmp_path} is a directory: name a new file" in refused(*new, tmp_path)
    assert ". is a directory: name a new file" in refused(*new[:-1], "--to=")
    assert "cannot be written" in refused(*new, tmp_path / "missing" / "ada.token")
    assert f"{tokens} is the file of hashes" in refused(*new, tokens)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ada.token", "link"], "and no token"


def test_a_token_that_cannot_be_kept_is_not_left_in_a_file(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.jsonl"
    tokens.touch(0o600)
    tokens.write_text("no tokens")
    new = ("token", "new", "ada", "--file", tokens, "--to", tmp_path / "ada.token")
    assert "does not hold tokens" in refused(*new)
    assert "is not a name for a token" in refused("token", "new", "a b", *new[3:])
    assert [path.name for path in tmp_path.iterdir()] == [tokens.name]
