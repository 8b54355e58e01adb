"""The commands of operators, on real servers, on files, and on a store with several replicas."""

import http.client
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from streams.journal.ownership import operators_path
from tests.rigs.command import Done, Following, run
from tests.rigs.operators import SocketConnection, fetched
from tests.rigs.redis_servers import running
from tests.wire.process import APP, Gate, ServerProcess, gate_in, wait_until
from tests.wire.raw import DEADLINE_S, Peer
from tests.wire.verbs import POSITIONS, start

ADMIN = ("--admin", "127.0.0.1:0")
_ADMIN_URL = re.compile(r"http://127\.0\.0\.1:\d+(?=/health/ready)")
RUDE = "\x1b[2J\x1b]0;owned\x07 \u202etxt"


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of state of this test's user, for the servers and the commands."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("MCP_STREAMS_ADMIN_TOKEN", raising=False)
    return tmp_path / "state" / "mcp-streams"


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with gate_in(tmp_path / "gate") as gate:
        yield gate


def admin_url(server: ServerProcess) -> str:
    """The address of the operator's endpoint, as the log tells it."""
    server.hear("/health/ready")
    return next(filter(None, map(_ADMIN_URL.search, server.log)))[0]


def asking(peer: Peer) -> str:
    """A call that waits for an answer; returns its id as operators see it."""
    peer.initialize(POSITIONS)
    started = start(peer, "ask")
    peer.expect(lambda message: message.method == "elicitation/create")
    return started.stream[:12]


def listed(*words: str) -> list[dict[str, Any]]:
    """The calls that `ls` lists as JSON."""
    done = succeeded("ls", *words, "--json")
    calls: list[dict[str, Any]] = json.loads(done.stdout)["calls"]
    return calls


def succeeded(*words: str) -> Done:
    done = run(*words)
    assert done.returncode == 0, done.stderr
    return done


def test_a_journals_name_leads_to_the_server_that_owns_it(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, server.connect("ws-streams") as peer:
        journal = str(server.journal)
        call = asking(peer)
        [found] = listed(journal)
        assert (found["id"], found["state"], found["transport"]) == (call, "asking", "websocket")
        assert call in succeeded("ls", journal).stdout
        shown = succeeded("show", call[:10], "--journal", journal).stdout
        assert "asking, waits for an answer" in shown
        assert re.search(r"^You missed \d+: .*1 question\.$", shown, re.MULTILINE), shown
        counts = json.loads(succeeded("stats", journal, "--json").stdout)
        assert (counts["asking"], counts["connections"]) == (1, {"websocket": 1})
        assert operators_path(server.journal).stat().st_mode & 0o777 == 0o600


def test_an_operator_cancels_and_the_client_is_told(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, server.connect("ws-streams") as peer:
        call = asking(peer)
        done = succeeded("cancel", call, "--journal", str(server.journal))
        assert call in done.stdout
        error = peer.expect(lambda message: "error" in message).error
        assert error["data"]["reason"] == "cancelled"
        again = run("cancel", call, "--journal", str(server.journal))
        assert (again.returncode, "has ended" in again.stderr) == (4, True)


def test_the_address_needs_the_operators_token(tmp_path: Path, state_folder: Path) -> None:
    """A token that the server has kept is found by its address; another one is refused."""
    with ServerProcess(tmp_path, options=ADMIN) as server, server.connect("ws-streams") as peer:
        url = admin_url(server)
        call = asking(peer)
        assert [each["id"] for each in listed(url)] == [call]
        [kept] = state_folder.glob("admin-*.token")
        assert kept.stat().st_mode & 0o777 == 0o600
        [told] = [line for line in server.log if "listening for operators" in line]
        assert str(kept) in told
        given = tmp_path / "token"
        given.write_text("0123456789abcdefghij")
        given.chmod(0o600)
        refused = run("ls", "--admin", url, "--token-file", str(given))
        assert refused.returncode == 2
        assert "refused the operator's token" in refused.stderr
        assert "--token-file" in refused.stderr
        assert "MCP_STREAMS_ADMIN_TOKEN" in refused.stderr
        given.write_text(kept.read_text())
        assert succeeded("ls", "--admin", url, "--token-file", str(given)).stdout
        kept.unlink()
        assert run("ls", url).returncode == 2
        env = {"MCP_STREAMS_ADMIN_TOKEN": given.read_text()}
        assert run("ls", url, env=env).returncode == 0


def test_operators_look_at_an_address_and_change_only_with_the_option(tmp_path: Path) -> None:
    for options, code in ((ADMIN, 2), ((*ADMIN, "--admin-write"), 0)):
        folder = tmp_path / str(code)
        folder.mkdir()
        with ServerProcess(folder, options=options) as server:
            url = admin_url(server)
            with server.connect("ws-streams") as peer:
                call = asking(peer)
                done = run("cancel", call, "--admin", url)
                assert done.returncode == code, done.stderr
                assert ("--admin-write" in done.stderr) == (code != 0)


def test_a_clients_token_opens_nothing_for_operators(tmp_path: Path) -> None:
    """And the operator's token nothing for clients."""
    tokens = tmp_path / "tokens"
    succeeded("token", "new", "ann", "--file", str(tokens), "--to", str(tmp_path / "ann"))
    made = (tmp_path / "ann").read_text().strip()
    options = (*ADMIN, "--admin-write", "--auth-tokens", str(tokens))
    with ServerProcess(tmp_path, options=options) as server:
        address = admin_url(server).removeprefix("http://")
        clients = {"authorization": f"Bearer {made}"}
        [kept] = (tmp_path / "state" / "mcp-streams").glob("admin-*.token")
        operators = {"authorization": f"Bearer {kept.read_text().strip()}"}

        def asked(place: str, target: str, headers: dict[str, str], method: str = "GET") -> int:
            connection = http.client.HTTPConnection(place, timeout=DEADLINE_S)
            return fetched(connection, target, method, headers=headers)[0]

        assert asked(address, "/api/stats", {}) == 401
        assert asked(address, "/api/stats", clients) == 401
        assert asked(address, "/api/stats", operators) == 200
        place = f"127.0.0.1:{server.http_port}"
        assert asked(place, "/mcp", operators, "DELETE") == 401
        assert asked(place, "/mcp", clients, "DELETE") != 401
        assert asked(place, "/api/stats", operators) in (401, 404)


@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"}],
)
def test_web_pages_are_kept_away(headers: dict[str, str], tmp_path: Path) -> None:
    with ServerProcess(tmp_path, options=ADMIN) as server:
        address = admin_url(server).removeprefix("http://")
        [kept] = (tmp_path / "state" / "mcp-streams").glob("admin-*.token")
        token = {"authorization": f"Bearer {kept.read_text().strip()}"}
        connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
        assert fetched(connection, "/api/stats", headers={**token, **headers})[0] == 403


def test_an_address_for_other_machines_makes_no_token(tmp_path: Path, state_folder: Path) -> None:
    """Such an address was opened for the probes of a kubelet: all else needs an own token."""
    with ServerProcess(tmp_path, options=("--admin", "0.0.0.0:0")) as server:
        server.hear("/health/ready")
        port = re.search(r":(\d+)/health/ready", "".join(server.log))
        assert port is not None
        done = run("ls", f"http://127.0.0.1:{port[1]}")
        assert "--admin-token-file" in done.stderr
        assert not list(state_folder.glob("admin-*.token"))


def test_the_endpoint_may_be_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with ServerProcess(tmp_path, options=("--admin", f"unix:{path}")) as server:
        server.hear("admin.sock")
        assert fetched(SocketConnection(path), "/health/live") == (200, b"ok\n")
        assert fetched(SocketConnection(path), "/api/stats")[0] == 401
        assert listed(f"unix:{path}") == []


def test_a_socket_that_cannot_be_is_refused(tmp_path: Path) -> None:
    for path, says in (("", "has no path"), (tmp_path / "no" / "s", "name a new file in a folder")):
        done = run("serve", APP, "--http", "127.0.0.1:0", "--admin", f"unix:{path}")
        assert (done.returncode, says in done.stderr, "Errno" in done.stderr) == (2, True, False)


def test_the_owner_of_a_stdio_servers_journal_is_asked(tmp_path: Path) -> None:
    journal = tmp_path / "journal.db"
    with ServerProcess(tmp_path) as server:
        server.kill()
        with server.connect("stdio") as peer:
            call = asking(peer)
            [found] = listed(str(journal))
            assert (found["id"], found["transport"]) == (call, "relay")
            assert succeeded("cancel", call, "--journal", str(journal)).stdout
            assert peer.expect(lambda message: "error" in message)


def test_a_journal_without_a_server_is_only_read(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        with server.connect("ws-streams") as peer:
            call = asking(peer)
        journal = str(server.journal)
        server.kill()
        before = server.journal.read_bytes()
        [found] = listed(journal)
        assert (found["id"], found["state"], found["pending"] > 0) == (call, "stopped", True)
        shown = succeeded("show", call, "--journal", journal).stdout
        assert "stopped" in shown
        assert "1 question" in shown
        tailed = succeeded("tail", call, "--journal", journal)
        assert "elicitation/create" in tailed.stdout
        assert json.loads(succeeded("stats", journal, "--json").stdout)["stopped"] == 1
        refused = run("cancel", call, "--journal", journal)
        assert (refused.returncode, "No process serves" in refused.stderr) == (2, True)
        assert server.journal.read_bytes() == before


def test_tail_follows_a_call_to_its_end(tmp_path: Path, gate: Gate) -> None:
    with ServerProcess(tmp_path) as server, server.connect("ws-streams") as peer:
        peer.initialize(POSITIONS)
        started = start(peer, "count", n=5, gate=gate.path)
        journal = str(server.journal)
        gate.wait_for("sent")
        follower = Following(
            "tail", started.stream[:12], "--journal", journal, "--every", "0.1", "--json"
        )
        try:
            gate.release()
            follower.wait_for("The call is completed")
            code, out = follower.end()
        finally:
            follower.kill()
        found = [json.loads(line) for line in out.splitlines()]
        assert code == 0
        assert [each["seq"] for each in found] == [1, 2, 3, 4, 5, 6]
        assert found[-1]["kind"] == "result"


def test_tail_without_a_call_tells_of_all_changes(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        follower = Following(
            *("tail", "--journal", str(server.journal), "--every", "0.1"),
            on_terminal=True,
            out_on_terminal=True,
        )
        try:
            follower.wait_for("from now on")
            with server.connect("ws-streams") as peer:
                call = asking(peer)
                follower.wait_for(f"{call}  ask  began, asking")
            follower.wait_for(f"{call}  ask  detached")
            follower.interrupt()
            assert follower.process.wait(DEADLINE_S) == 130
        finally:
            follower.kill()


@pytest.mark.parametrize("by", ["--journal", "--admin"])
def test_a_tail_goes_on_with_the_next_server(by: str, tmp_path: Path) -> None:
    address = tmp_path / "admin.sock"
    with ServerProcess(tmp_path, options=("--admin", f"unix:{address}")) as server:
        server.hear("admin.sock")
        place = str(server.journal) if by == "--journal" else f"unix:{address}"
        follower = Following(
            *("tail", by, place, "--every", "0.1"), on_terminal=True, out_on_terminal=True
        )
        try:
            follower.wait_for("from now on")
            server.kill()
            if by == "--admin":
                follower.wait_for("Looking again until Ctrl-C")
            server.start()
            if by == "--admin":
                follower.wait_for("answers again")
            with server.connect("ws-streams") as peer:
                call = asking(peer)
                follower.wait_for(f"{call}  ask  began")
            follower.interrupt()
            assert follower.process.wait(DEADLINE_S) == 130
        finally:
            follower.kill()


def test_what_a_tool_sends_never_controls_the_terminal(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, server.connect("ws-streams") as peer:
        peer.initialize(POSITIONS)
        started = start(peer, "forever", id=f"{RUDE}")
        journal = str(server.journal)
        for words in (("ls", journal), ("show", started.stream[:12], "--journal", journal)):
            done = succeeded(*words)
            assert "\x1b" not in done.stdout + done.stderr
            assert "\u202e" not in done.stdout + done.stderr


def test_wrong_words_are_explained(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        journal = str(server.journal)
        cases = [
            (("ls", str(tmp_path / "nowhere.db")), 2, "there is no such file"),
            (("ls",), 2, "or a journal"),
            (("ls", "http://127.0.0.1:1"), 3, "cannot be asked"),
            (("ls", f"http://127.0.0.1:{server.http_port}"), 3, "--admin"),
            (("ls", "127.0.0.1:9090"), 2, "--admin: http://127.0.0.1:9090"),
            (("drain", journal, "--admin", "http://127.0.0.1:1"), 2, "name one place"),
            (("stats", journal, "--journal", "other.db"), 2, "name one place"),
            (("show", "x", "--journal", journal, "--admin", "unix:/s"), 2, "name one place"),
            (("cancel", "x", "--journal", journal, "--admin", "unix:/s"), 2, "name one place"),
            (("ls", journal, "--state", "runing"), 2, "did you mean running"),
            (("ls", journal, "--every", "0"), 2, "--every"),
            (("show", "nothing", "--journal", journal), 4, "No call has an id"),
            (("show", "WCX", "r.db"), 2, "write show WCX --journal r.db"),
            (("tail", journal), 2, f"that is a file: write --journal {journal}"),
            (("cancel", "WCXunknown"), 2, "add --journal FILE or --admin URL"),
            (("cancel", "x", "y", "--journal", journal), 2, "operator"),
        ]
        for words, code, says in cases:
            done = run(*words)
            assert (done.returncode, says in done.stderr) == (code, True), (words, done.stderr)


def test_all_replicas_show_the_calls_of_all(tmp_path: Path) -> None:
    """Each asks the store for the calls of the others; the store alone shows them as well."""
    with ExitStack() as stack:
        store = stack.enter_context(running("redis", tmp_path / "store", "--appendonly", "yes"))
        url = f"{store.url}/0"
        servers = []
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            options = (*ADMIN, "--admin-write")
            made = ServerProcess(folder, store=url, options=options)
            servers.append(stack.enter_context(made))
        peers = [stack.enter_context(server.connect("ws-streams")) for server in servers]
        calls = {asking(peer) for peer in peers}
        addresses = [admin_url(server) for server in servers]
        for address in addresses:
            found = listed(address)
            assert {each["id"] for each in found} == calls
            assert len({each["owner"] for each in found}) == 3
        assert {each["id"] for each in listed(url)} == calls
        for words in (("drain", url), ("cancel", next(iter(calls)), "--journal", url)):
            done = run(*words)
            assert (done.returncode, "name a replica's --admin" in done.stderr) == (2, True), done
        elsewhere = next(each for each in listed(addresses[0]) if not each["isInMemory"])
        assert succeeded("cancel", elsewhere["id"], "--admin", addresses[0]).stdout

        def state() -> str:
            done = succeeded("show", elsewhere["id"], "--admin", addresses[0], "--json")
            return str(json.loads(done.stdout)["state"])

        wait_until("its owner cancels it", lambda: state() == "cancelled")


def test_a_drained_server_waits_for_its_calls_and_ends(tmp_path: Path, gate: Gate) -> None:
    with ServerProcess(tmp_path) as server, server.connect("ws-streams") as peer:
        peer.initialize(POSITIONS)
        started = start(peer, "count", n=1, gate=gate.path)
        gate.wait_for("sent")
        drainer = Following("drain", str(server.journal), "--grace", "1m")
        try:
            drainer.wait_for("1 call runs")
            gate.release()
            drainer.wait_for("The server has ended")
            code, out = drainer.end()
        finally:
            drainer.kill()
        assert (code, "1m at most" in out) == (0, True)
        assert not server.is_alive()
        [found] = listed(str(server.journal))
        assert (found["id"], found["state"]) == (started.stream[:12], "completed")
        refused = run("drain", str(server.journal))
        assert (refused.returncode, "No process serves" in refused.stderr) == (2, True)


def test_the_feed_is_sent_over_a_real_socket(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        connection = SocketConnection(operators_path(server.journal))
        connection.request("GET", "/api/events")
        answer = connection.getresponse()
        assert answer.headers["content-type"] == "text/event-stream"
        with server.connect("ws-streams") as peer:
            call = asking(peer)
            read = b""
            while call.encode() not in read or b'"state":"asking"' not in read:
                read += answer.read1()
        connection.close()


def test_watch_draws_again_until_it_is_interrupted(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, server.connect("ws-streams") as peer:
        watcher = Following(
            *("ls", str(server.journal), "--watch", "--every", "0.1"),
            on_terminal=True,
            out_on_terminal=True,
        )
        try:
            watcher.wait_for("principal")
            call = asking(peer)
            watcher.wait_for(call)
            watcher.wait_for("asking")
            os.kill(watcher.process.pid, signal.SIGINT)
            assert watcher.process.wait(DEADLINE_S) == 130
        finally:
            watcher.kill()
