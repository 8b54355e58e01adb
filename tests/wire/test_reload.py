"""SIGHUP makes a server read its certificate, tokens and keys again, and ends no connection."""

import contextlib
import http.client
import json
import os
import pty
import select
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from tests.acceptance.launch import Spawned, owner_pid, wait_for_end
from tests.rigs import jwts
from tests.rigs.command import run
from tests.rigs.needing import needed
from tests.wire.process import APP, CLI, ServerProcess, wait_until
from tests.wire.raw import DEADLINE_S
from tests.wire.verbs import STREAMS

PING = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "ping"}).encode()
READ_AGAIN = "the certificate was read again"
STAYS = "the certificate in use stays"


class Certificates:
    """The files of a certificate and its key, which can be renewed."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.certificate, self.key = folder / "cert.pem", folder / "key.pem"
        self.key.touch(0o600)
        self.renew()

    def renew(self) -> bytes:
        """Write a new certificate and its key; returns what a handshake must show."""
        issued = self.authority.issue_cert("localhost", "127.0.0.1")
        self.certificate.write_bytes(issued.cert_chain_pems[0].bytes())
        self.key.write_bytes(issued.private_key_pem.bytes())
        return ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())

    def connection(self, port: int) -> http.client.HTTPSConnection:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return http.client.HTTPSConnection("127.0.0.1", port, timeout=DEADLINE_S, context=context)

    def shown_at(self, port: int) -> bytes | None:
        """The certificate that a new handshake shows."""
        with contextlib.closing(self.connection(port)) as connection:
            connection.connect()
            return shown(connection)


def shown(connection: http.client.HTTPSConnection) -> bytes | None:
    assert isinstance(connection.sock, ssl.SSLSocket)
    return connection.sock.getpeercert(binary_form=True)


def status(connection: http.client.HTTPConnection, token: str = "") -> int:
    """The status for a request without a session; 401 where the token is refused."""
    fields = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    if token:
        fields["Authorization"] = f"Bearer {token}"
    connection.request("POST", "/mcp", PING, fields)
    response = connection.getresponse()
    response.read()
    return response.status


def hang_up(server: ServerProcess, said: str) -> None:
    """Send SIGHUP, and wait for the line of log that answers it."""
    before = sum(said in line for line in server.log)
    server.send(signal.SIGHUP)
    wait_until(f"not {said!r}", lambda: sum(said in line for line in server.log) > before)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@pytest.fixture
def secure(tmp_path: Path, certificates: Certificates) -> Iterator[ServerProcess]:
    options = ("--tls-cert", certificates.certificate, "--tls-key", certificates.key)
    with ServerProcess(tmp_path, options=tuple(map(str, options))) as server:
        yield server


@pytest.mark.needs_one_process("the balancer speaks no TLS")
def test_new_handshakes_show_the_new_certificate_and_connections_go_on(
    secure: ServerProcess, certificates: Certificates
) -> None:
    connection = certificates.connection(secure.http_port)
    before = status(connection)
    kept, first = connection.sock, shown(connection)
    second = certificates.renew()
    assert certificates.shown_at(secure.http_port) == first, "not before it is told"
    hang_up(secure, READ_AGAIN)
    for port in (secure.http_port, secure.port):
        assert certificates.shown_at(port) == second
    assert status(connection) == before
    assert connection.sock is kept
    connection.close()
    third = certificates.renew()
    hang_up(secure, READ_AGAIN)
    assert certificates.shown_at(secure.port) == third
    assert secure.stop() == 0


def break_key(certificates: Certificates) -> None:
    certificates.key.write_text("no key")


def break_certificate(certificates: Certificates) -> None:
    certificates.certificate.write_text("")


def remove_key(certificates: Certificates) -> None:
    certificates.key.unlink()


def change_key_alone(certificates: Certificates) -> None:
    before = certificates.certificate.read_bytes()
    certificates.renew()
    certificates.certificate.write_bytes(before)


def show_key_to_others(certificates: Certificates) -> None:
    certificates.renew()
    certificates.key.chmod(0o644)


def encrypt_key(certificates: Certificates) -> None:
    key = serialization.load_pem_private_key(certificates.key.read_bytes(), None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    certificates.key.write_bytes(encrypted)


def plant_a_pipe(certificates: Certificates) -> None:
    certificates.key.unlink()
    os.mkfifo(certificates.key, 0o600)


@pytest.mark.needs_one_process("the balancer speaks no TLS")
@pytest.mark.parametrize(
    "harm",
    [
        break_key,
        break_certificate,
        remove_key,
        change_key_alone,
        show_key_to_others,
        encrypt_key,
        plant_a_pipe,
    ],
)
def test_what_cannot_be_used_leaves_the_certificate_in_force(
    secure: ServerProcess, certificates: Certificates, harm: Any
) -> None:
    first = certificates.shown_at(secure.port)
    harm(certificates)
    hang_up(secure, STAYS)
    [said] = [line for line in secure.log if "error" in line]
    assert str(certificates.key) in said or str(certificates.certificate) in said
    for port in (secure.http_port, secure.port):
        assert certificates.shown_at(port) == first
    certificates.key.unlink(missing_ok=True)
    certificates.key.touch(0o600)
    second = certificates.renew()
    hang_up(secure, READ_AGAIN)
    assert certificates.shown_at(secure.http_port) == second


def test_tokens_are_read_again_and_what_is_wrong_with_them_is_told(tmp_path: Path) -> None:
    tokens, mine = tmp_path / "tokens.jsonl", tmp_path / "ada.token"
    run("token", "new", "ada", "--file", str(tokens), "--to", str(mine))
    secret = mine.read_text().strip()
    with ServerProcess(tmp_path, options=("--auth-tokens", str(tokens))) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=DEADLINE_S)
        taken = status(connection, secret)
        assert taken != 401
        tokens.chmod(0o644)
        for _ in range(2):  # logged at each check
            hang_up(server, f"run chmod 600 {tokens}")
        tokens.chmod(0o600)
        hang_up(server, "reloading")
        assert status(connection, secret) == taken
        connection.close()
        assert server.stop() == 0


@pytest.mark.needs_one_process("replicas read the keys one after the other")
def test_a_key_set_is_read_again_at_once(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [jwts.jwk(jwts.RSA, "one")]}))
    issuer = ("--auth-issuer", jwts.ISSUER, "--auth-audience", jwts.AUDIENCE)
    with ServerProcess(tmp_path, options=("--auth-jwks", str(keys), *issuer)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=DEADLINE_S)
        old, new = jwts.signed(jwts.RSA, kid="one"), jwts.signed(jwts.STRANGER, kid="two")
        taken = status(connection, old)
        assert taken != 401
        assert status(connection, new) == 401
        keys.write_text(json.dumps({"keys": [jwts.jwk(jwts.STRANGER, "two")]}))
        server.send(signal.SIGHUP)
        wait_until("the new key is not taken", lambda: status(connection, new) == taken)
        assert status(connection, old) == 401
        keys.write_text("no keys")
        hang_up(server, "the former ones stay")
        assert status(connection, new) == taken
        connection.close()


@pytest.mark.needs_one_process("the balancer speaks no TLS")
def test_nothing_waits_for_an_issuer_that_does_not_answer(
    tmp_path: Path, certificates: Certificates
) -> None:
    """A SIGHUP reads certificate and tokens at once, and fetches the keys in the background."""
    tokens = tmp_path / "tokens.jsonl"
    tokens.touch(0o600)
    with socket.create_server(("127.0.0.1", 0)) as issuer:
        issuer.settimeout(DEADLINE_S)
        options = (
            *("--tls-cert", certificates.certificate, "--tls-key", certificates.key),
            *("--auth-tokens", tokens, "--auth-audience", jwts.AUDIENCE),
            *("--auth-jwks", f"http://127.0.0.1:{issuer.getsockname()[1]}/keys"),
            *("--auth-issuer", jwts.ISSUER),
        )
        silent = []

        def answer_once() -> None:
            connection, _ = issuer.accept()
            with connection:
                body = json.dumps({"keys": [jwts.jwk(jwts.RSA, "one")]}).encode()
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + body)

        with ThreadPoolExecutor(1) as threads:
            answered = threads.submit(answer_once)
            with ServerProcess(tmp_path, options=tuple(map(str, options))) as server:
                answered.result()
                for _ in range(3):
                    renewed = certificates.renew()
                    hang_up(server, READ_AGAIN)
                    if not silent:
                        silent.append(issuer.accept()[0])
                    assert certificates.shown_at(server.port) == renewed
                tokens.chmod(0o644)
                hang_up(server, f"run chmod 600 {tokens}")
                assert not any("the keys cannot be read" in line for line in server.log)
                silent[0].close()
                assert server.stop() == 0


# Servers without files to read again


def test_a_server_without_anything_to_reload_goes_on(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, server.connect("ws-mcp") as peer:
        peer.initialize(STREAMS)
        hang_up(server, "reloading")
        assert peer.ask("ping").result == {}
        assert server.stop() == 0


def test_relay_and_owner_go_on(tmp_path: Path) -> None:
    journal = tmp_path / "journal.db"
    with Spawned(journal, "--linger", "0.5") as peer:
        peer.initialize(STREAMS)
        owner = owner_pid(journal)
        for pid in (peer.process.pid, owner):
            os.kill(pid, signal.SIGHUP)
            assert peer.ask("ping").result == {}
        assert peer.end_as_sdks_do(grace_s=DEADLINE_S) == 0
    wait_for_end(owner)
    assert "reloading" in Path(f"{journal}.log").read_text()


def test_a_server_of_one_client_goes_on(tmp_path: Path) -> None:
    with Spawned(tmp_path / "journal.db", "--foreground") as peer:
        peer.initialize(STREAMS)
        os.kill(peer.process.pid, signal.SIGHUP)
        assert peer.ask("ping").result == {}
        assert peer.end_as_sdks_do(grace_s=DEADLINE_S) == 0


def test_what_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which children inherit
    try:
        with ServerProcess(tmp_path) as server:
            assert all(map(ignores_hangups, server.pids))
            server.send(signal.SIGHUP)
            assert server.stop() == 0
        assert not any("reloading" in line for line in server.log)
        journal = tmp_path / "other.db"
        with Spawned(journal, "--linger", "0.5") as peer:
            peer.initialize(STREAMS)
            assert ignores_hangups(peer.process.pid)
            assert ignores_hangups(owner_pid(journal))
    finally:
        signal.signal(signal.SIGHUP, before)


def ignores_hangups(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [ignored] = [line.split()[1] for line in lines if line.startswith("SigIgn")]
    return bool(int(ignored, 16) & 1 << (signal.SIGHUP - 1))


@pytest.mark.parametrize("logs_there", [True, False])
def test_a_server_ends_in_good_order_with_its_terminal(tmp_path: Path, logs_there: bool) -> None:
    setsid = needed("setsid", "give a server a terminal of its own")
    ours, theirs = pty.openpty()
    log = tmp_path / "log"
    with log.open("wb") as file:
        server = subprocess.Popen(
            [setsid, "--ctty", *CLI, "serve", APP, "--ws", "127.0.0.1:0"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs if logs_there else file,
        )
    os.close(theirs)
    said = ""

    def has_said(what: str) -> bool:
        nonlocal said
        if logs_there and select.select([ours], [], [], 0)[0]:
            said += os.read(ours, 1 << 16).decode()
        return what in (said if logs_there else log.read_text())

    try:
        wait_until("it does not listen", lambda: has_said("listening"))
        os.kill(server.pid, signal.SIGHUP)
        wait_until("it does not reload", lambda: has_said("reloading"))
        os.close(ours)
        assert server.wait(DEADLINE_S) == 0, log.read_text()
    finally:
        server.kill()
        server.wait()
    assert logs_there or has_said("shutting down")
