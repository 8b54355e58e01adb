"""A real Prometheus reads real servers, and every query of the dashboard returns data from it."""

import contextlib
import json
import math
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.rigs import ROOT
from tests.rigs.children import NAUGHTY
from tests.rigs.command import Following
from tests.rigs.needing import needed
from tests.rigs.redis_servers import running
from tests.wire.httppeer import HttpPeer
from tests.wire.process import ServerProcess, kept_port, wait_until
from tests.wire.raw import DEADLINE_S, method_is
from tests.wire.verbs import POSITIONS, UNKNOWN, called, read_stream, start

DASHBOARD: Final = ROOT / "docs/operate/grafana.json"
PAGE: Final = ROOT / "docs/operate/operations.md"
TOKEN: Final = "operators-" + "x" * 43
RATE_S: Final = 10
_HEALTH: Final = r"http://127\.0\.0\.1:\d+/health/ready"

Json = dict[str, Any]


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(TOKEN)
    return file


def options(token_file: Path) -> tuple[str, ...]:
    return ("--admin=127.0.0.1:0", f"--admin-token-file={token_file}")


@contextmanager
def serving(folder: Path, token_file: Path) -> Iterator[tuple[ServerProcess, int]]:
    """A server of tools, and the port of its operators."""
    with ServerProcess(folder, options=options(token_file)) as server:
        server.hear("/health/ready")
        yield server, port_in("".join(server.log))


@contextmanager
def wrapping(token_file: Path) -> Iterator[tuple[int, int]]:
    """A wrapped command; the ports of its clients and of its operators."""
    words = ("--http=127.0.0.1:0", f"--journal={token_file.parent / 'wrapped.db'}")
    command = ("--", sys.executable, "-I", "-S", NAUGHTY)
    wrapped = Following("wrap", *words, *options(token_file), *command)
    try:
        admin = port_in(wrapped.wait_for(_HEALTH))
        yield port_in(wrapped.wait_for(r"http://127\.0\.0\.1:\d+/mcp")), admin
    finally:
        wrapped.interrupt()
        wrapped.end()


def port_in(log: str) -> int:
    found = re.search(r"http://127\.0\.0\.1:(\d+)/(?:health/ready|mcp)", log)
    assert found is not None, log
    return int(found[1])


def fetched(url: str, token: str = "") -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return str(answer.read().decode())


def metrics(port: int) -> str:
    return fetched(f"http://127.0.0.1:{port}/metrics", TOKEN)


class Prometheus:
    """A Prometheus that scrapes these ports."""

    def __init__(self, folder: Path, token_file: Path, ports: list[int]) -> None:
        program = needed("prometheus", "read metrics as operators do")
        targets = [f"127.0.0.1:{port}" for port in ports]
        file = folder / "prometheus.yml"
        # JSON is YAML.
        scrape: Json = {"job_name": "mcp-streams", "static_configs": [{"targets": targets}]}
        scrape["authorization"] = {"credentials_file": str(token_file)}
        settings = {"scrape_interval": "1s", "scrape_timeout": "1s"}
        file.write_text(json.dumps({"global": settings, "scrape_configs": [scrape]}))
        port = kept_port()
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [
                program,
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def is_ready(self) -> bool:
        assert self.process.poll() is None, "Prometheus has ended"
        with contextlib.suppress(OSError):
            return "Ready" in fetched(f"{self.url}/-/ready")
        return False

    def values(self, query: str) -> list[float]:
        """The values that a query returns now, without those that are no number."""
        asked = urllib.parse.urlencode({"query": query})
        answer = json.loads(fetched(f"{self.url}/api/v1/query?{asked}"))
        assert answer["status"] == "success", answer
        found = [float(each["value"][1]) for each in answer["data"]["result"]]
        return [each for each in found if not math.isnan(each)]

    def targets(self) -> list[Json]:
        answer = json.loads(fetched(f"{self.url}/api/v1/targets"))
        found: list[Json] = answer["data"]["activeTargets"]
        return found


@contextmanager
def prometheus(folder: Path, token_file: Path, ports: list[int]) -> Iterator[Prometheus]:
    started = Prometheus(folder, token_file, ports)
    try:
        wait_until("Prometheus is ready", started.is_ready)
        yield started
    finally:
        started.process.kill()
        started.process.wait()


def queries() -> dict[str, str]:
    """The queries of the dashboard as Grafana sends them, by the titles of their panels."""
    found = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", f"{RATE_S}s")
            found[f"{panel['title']}: {target['refId']}"] = query.replace("$instance", ".*")
    return found


def leave_traces(server: ServerProcess) -> None:
    """Let the server have something of everything: open questions, resumes, refusals."""
    asking = server.connect("ws-streams")
    asking.initialize(POSITIONS)
    started = start(asking, "ask")
    asking.expect(method_is("elicitation/create"))
    asking.cut()
    with server.connect("ws-streams") as back:
        back.initialize(POSITIONS)
        back.request("stream/resume", {**started.with_token, "after": 0})
        back.expect(method_is("elicitation/create"))
        read_stream(back, {"streamId": UNKNOWN})


def call_once(server: ServerProcess) -> None:
    with server.connect("ws-streams") as peer:
        peer.initialize(POSITIONS)
        called(peer, "count", n=5)
        called(peer, "fail")


def kill_child(port: int) -> None:
    """Call a tool of the wrapped command that ends its process, and then another one."""
    with HttpPeer(port, "http-sse") as peer:
        peer.initialize(POSITIONS)
        called(peer, "leave", code=3)
        called(peer, "echo")


@pytest.mark.timeout(300)
def test_prometheus_has_data_for_every_query_of_the_dashboard(
    tmp_path: Path, token_file: Path
) -> None:
    missing = queries()
    assert len(missing) > 30
    with (
        serving(tmp_path, token_file) as (server, port),
        wrapping(token_file) as (http, other_port),
        prometheus(tmp_path, token_file, [port, other_port]) as reader,
    ):
        leave_traces(server)

        def has_all() -> bool:
            call_once(server)
            kill_child(http)
            for title, query in list(missing.items()):
                if reader.values(query):
                    del missing[title]
            return not missing

        wait_until(f"data for {list(missing)}", has_all)
        assert [each["health"] for each in reader.targets()] == ["up", "up"]
        assert reader.values("sum(mcp_streams_questions_open)") == [1.0]
        assert max(reader.values("mcp_streams_child_restarts_total")) > 0


def test_promtool_finds_no_fault(tmp_path: Path, token_file: Path) -> None:
    promtool = needed("promtool", "check metrics")
    with serving(tmp_path, token_file) as (server, port):
        leave_traces(server)
        call_once(server)
        checked = subprocess.run(
            [promtool, "check", "metrics"],
            input=metrics(port),
            capture_output=True,
            text=True,
            check=False,
        )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_each_replica_tells_of_itself_and_of_a_store_that_is_away(
    tmp_path: Path, token_file: Path
) -> None:
    more = (*options(token_file), "--lease=2")
    with contextlib.ExitStack() as opened:
        store = opened.enter_context(running("redis", tmp_path / "store", "--appendonly", "yes"))
        ports = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            replica = ServerProcess(tmp_path / name, store=f"{store.url}/0", options=more)
            opened.enter_context(replica)
            replica.hear("/health/ready")
            ports.append(port_in("".join(replica.log)))

        def told(port: int, name: str) -> list[float]:
            families = text_string_to_metric_families(metrics(port))
            samples = [each for family in families for each in family.samples]
            return [each.value for each in samples if each.name == f"mcp_streams_{name}"]

        wait_until(
            "both know both", lambda: [told(each, "replicas") for each in ports] == [[2]] * 2
        )
        call_once(replica)
        assert [told(each, "calls_begun_total") for each in ports] == [[0], [2]]
        assert told(ports[1], "journal_bytes") > [0]
        store.pause()
        wait_until("the store is away", lambda: told(ports[0], "store_up") == [0])
        assert told(ports[0], "ready") == [0]
        store.resume()
        wait_until("the store is back", lambda: told(ports[0], "store_up") == [1])


def test_they_need_the_operators_token(tmp_path: Path, token_file: Path) -> None:
    with serving(tmp_path, token_file) as (_, port):
        for token in ("", "another"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                fetched(f"http://127.0.0.1:{port}/metrics", token)
            assert refused.value.code == 401
            refused.value.close()


def test_they_have_no_secrets_and_no_words_of_clients(tmp_path: Path, token_file: Path) -> None:
    with serving(tmp_path, token_file) as (server, port):
        with server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            started = start(peer, "count", n=1)
            called(peer, "no such tool")
        text = metrics(port)
    assert started.token not in text
    assert started.stream not in text
    assert "no such tool" not in text
    assert TOKEN not in text


def test_the_page_for_operators_names_each_metric(tmp_path: Path, token_file: Path) -> None:
    with wrapping(token_file) as (_, port):
        families = list(text_string_to_metric_families(metrics(port)))
    told = {
        each.name + ("_total" if each.type == "counter" else "")
        for each in families
        if each.name.startswith("mcp_streams_")
    }
    section = PAGE.read_text().split("\n## Metrics\n")[1].split("\n## ")[0]
    assert set(re.findall(r"`(mcp_streams_\w+)", section)) == told
