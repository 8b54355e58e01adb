"""compose.yaml and kubernetes.yaml of docs/operate/replicas: well-formed, and with true options."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from streams.cli.selftest.torture import APP
from tests.rigs.balancers import FOLDER
from tests.rigs.command import Following
from tests.rigs.doc_pages import free_port


@pytest.fixture
def compose() -> Any:
    return yaml.safe_load((FOLDER / "compose.yaml").read_text())


@pytest.fixture
def kubernetes() -> Any:
    return list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))


def options_of(words: Sequence[str]) -> list[str]:
    return [part for word in words for part in word.split("=", 1)]


def check_options(words: Sequence[str], folder: Path) -> None:
    """Check that `serve` takes these options, at ports that are free.

    The store is not there: `serve` waits for it, unless it refuses an option.
    """
    changes = {f"0.0.0.0:{port}": "127.0.0.1:0" for port in (8080, 8765, 9090)}
    given = [changes.pop(word, word) for word in options_of(words)]
    assert not changes, "these are to be among the options"
    store = {"MCP_STREAMS_SERVE_JOURNAL": f"redis://127.0.0.1:{free_port()}/0"}
    with Following("serve", APP, *given, cwd=folder, env=store) as serving:
        serving.wait_for("waiting for the store of the journal")


def test_the_services_of_compose_fit_together(compose: Any) -> None:
    services = compose["services"]
    replicas = {name: one for name, one in services.items() if name.startswith("replica-")}
    assert set(replicas) == {"replica-1", "replica-2", "replica-3"}
    first = replicas["replica-1"]
    assert all(one == first for one in replicas.values())
    assert set(first["depends_on"]) < set(services)
    assert "healthcheck" in services["store"]
    for each in services.values():
        assert each["restart"] == "always"
        for volume in each.get("volumes", ()):
            source = volume.split(":")[0]
            known = source in compose["volumes"] or (FOLDER / source).exists()
            assert known or source == "./mcp.pem", volume


def test_the_store_of_compose_keeps_what_it_acknowledges(compose: Any) -> None:
    command = compose["services"]["store"]["command"]
    for setting in ("appendonly yes", "appendfsync always", "maxmemory-policy noeviction"):
        assert f"--{setting}" in command


def test_haproxy_finds_the_replicas_of_compose(compose: Any) -> None:
    words = compose["services"]["replica-1"]["command"].split()
    configuration = (FOLDER / "haproxy.cfg").read_text()
    for name in compose["services"]:
        if name.startswith("replica-"):
            assert f"server {name} {name}:8080\n" in configuration
            assert f"server {name} {name}:8765 track streams/{name}\n" in configuration
    assert "check port 9090 " in configuration
    for option, port in (("--http", 8080), ("--ws", 8765), ("--admin", 9090)):
        assert words[words.index(option) + 1] == f"0.0.0.0:{port}"


def test_serve_takes_the_options_of_compose(compose: Any, tmp_path: Path) -> None:
    words = compose["services"]["replica-1"]["command"].split()
    check_options(words, tmp_path)


def test_the_url_of_the_store_is_on_no_command_line(compose: Any, kubernetes: Any) -> None:
    replica = compose["services"]["replica-1"]
    [container] = kubernetes[0]["spec"]["template"]["spec"]["containers"]
    for words in (replica["command"].split(), container["args"]):
        assert not any(word.startswith("--journal") for word in words)
    assert "redis://store:6379/0" in replica["environment"]["MCP_STREAMS_SERVE_JOURNAL"]
    [variable] = container["env"]
    assert variable["name"] == "MCP_STREAMS_SERVE_JOURNAL"
    assert set(variable["valueFrom"]["secretKeyRef"]) == {"name", "key"}


def test_serve_takes_the_options_of_kubernetes(kubernetes: Any, tmp_path: Path) -> None:
    [container] = kubernetes[0]["spec"]["template"]["spec"]["containers"]
    check_options(container["args"], tmp_path)


def test_the_probes_ask_for_paths_that_there_are(kubernetes: Any) -> None:
    deployment, service = kubernetes
    assert (deployment["kind"], service["kind"]) == ("Deployment", "Service")
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": 8080, "ws": 8765, "admin": 9090}
    for probe, path in (
        ("readinessProbe", "/health/ready"),
        ("livenessProbe", "/health/live"),
    ):
        assert container[probe]["httpGet"] == {"path": path, "port": "admin"}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert "sessionAffinity" not in service["spec"]
    targets = {port["targetPort"] for port in service["spec"]["ports"]}
    assert targets == {"http", "ws"}  # operators' port is for the probes alone
    # A server that is asked to end needs 4 s at most, after the pause.
    pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause_s + 4
    # One that stands still is not asked: it would wait for all of that time.
    assert container["livenessProbe"]["terminationGracePeriodSeconds"] == 1
