"""The files of docs/operate/single: well-formed, hardened, and with true options.

The unit is verified and rated by systemd-analyze. The Dockerfile is linted, since no image can be
built here; its health check and its command are run.
"""

import json
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from streams.process.deadline import DEADLINE_S
from tests.rigs import ROOT
from tests.rigs.doc_pages import free_port
from tests.rigs.needing import needed
from tests.wire.process import APP, CLI, ServerProcess

FOLDER = ROOT / "docs" / "operate" / "single"
UNIT = FOLDER / "reports.service"
EXPOSURE_MAX = 2.0  # of 10
ANSWER_S = 60.0


def settings(path: Path) -> dict[str, str]:
    """The settings of a unit; those that stand twice are joined."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines():
        name, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            found[name] = f"{found[name]} {value}" if name in found else value
    return found


def refusal_of(words: Sequence[str]) -> str:
    """Why `serve` ends with these options, with a journal in a folder that there is not.

    An option that does not exist, or does not go with another one, has another reason.
    """
    given = [re.sub(r"0\.0\.0\.0:\d+|127\.0\.0\.1:\d+", "127.0.0.1:0", word) for word in words]
    done = subprocess.run(
        [*CLI, "serve", APP, *given],
        capture_output=True,
        text=True,
        timeout=ANSWER_S,
        check=False,
    )
    assert done.returncode == 2, done
    return done.stderr


def grace_of(words: Sequence[str]) -> float:
    """The seconds of --grace."""
    flat = [part for word in words for part in word.split("=", 1)]
    return float(flat[flat.index("--grace") + 1])


def test_the_unit_is_valid_and_its_exposure_is_low(tmp_path: Path) -> None:
    program = needed("systemd-analyze", "verify the units")
    command = settings(UNIT)["ExecStart"].split()[0]
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(command, sys.executable))
    socket_unit = tmp_path / "reports.socket"
    socket_unit.write_text((FOLDER / "reports.socket").read_text())
    verified = subprocess.run(
        [program, "verify", "--man=no", str(unit), str(socket_unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (verified.returncode, verified.stderr) == (0, "")
    rated = subprocess.run(
        [program, "security", "--offline=true", str(unit)],
        capture_output=True,
        text=True,
        check=True,
    )
    exposure = re.search(r"Overall exposure level for reports.service: ([\d.]+)", rated.stdout)
    assert exposure is not None
    assert float(exposure[1]) <= EXPOSURE_MAX


def test_the_unit_serves_at_its_socket_with_options_that_there_are() -> None:
    told = settings(UNIT)
    _, serve, _, *words = shlex.split(told["ExecStart"])
    assert serve == "serve"
    listens = settings(FOLDER / "reports.socket")["ListenStream"]
    assert words[words.index("--http") + 1] == listens
    journal = words[words.index("--journal") + 1]
    assert journal.startswith(f"/var/lib/{told['StateDirectory']}/")
    assert "there is no directory" in refusal_of(words)
    assert int(told["TimeoutStopSec"]) > grace_of(words) + DEADLINE_S


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, with their arguments."""
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    told = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    return [(name, value) for name, _, value in told]


def test_the_image_is_small_and_runs_as_a_user_without_rights() -> None:
    names = [name for name, _ in instructions()]
    stages = [value for name, value in instructions() if name == "FROM"]
    assert all("-slim" in stage for stage in stages)
    assert len(stages) == 2, "what builds the environment stays behind"
    last = names[len(names) - 1 - names[::-1].index("FROM") :]
    assert last.index("USER") < last.index("ENTRYPOINT")
    (user,) = (value for name, value in instructions() if name == "USER")
    assert int(user.split(":")[0]) >= 1000
    assert "ADD" not in names
    for name, value in instructions():
        if name in ("ENTRYPOINT", "CMD"):
            assert json.loads(value)
        if name == "RUN" and "pip" in value:
            assert "--no-cache-dir" in value


def test_the_command_of_the_image_has_options_that_there_are() -> None:
    told = dict(instructions())
    _, serve, _, *words = json.loads(told["ENTRYPOINT"])
    assert serve == "serve"
    assert "there is no directory /data" in refusal_of([*words, *json.loads(told["CMD"])])


def test_the_health_check_of_the_image_tells_whether_a_server_is_ready(tmp_path: Path) -> None:
    check = dict(instructions())["HEALTHCHECK"]
    _, code, script = json.loads(check[check.index("[") :])
    port = free_port()
    assert "127.0.0.1:9090/health/ready" in script
    command = [sys.executable, code, script.replace("9090", str(port))]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
    with ServerProcess(tmp_path, options=("--admin", f"127.0.0.1:{port}")):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health/live").close()
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_compose_runs_the_image_without_a_place_to_write_but_its_volume() -> None:
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    service: Any = compose["services"]["reports"]
    words = service["command"].split()
    assert "there is no directory /data" in refusal_of([*words, "--journal", "/data/reports.db"])
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    (volume,) = service["volumes"]
    assert volume.split(":")[0] in compose["volumes"]
    assert float(service["stop_grace_period"][:-1]) > grace_of(words) + DEADLINE_S


def test_kubernetes_runs_one_pod_on_a_volume_of_its_own() -> None:
    stateful, service = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    assert (stateful["kind"], service["kind"]) == ("StatefulSet", "Service")
    assert stateful["spec"]["replicas"] == 1
    pod = stateful["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = container["args"]
    assert "there is no directory /data" in refusal_of([*words, "--journal", "/data/reports.db"])
    assert pod["terminationGracePeriodSeconds"] > grace_of(words) + DEADLINE_S
    assert container["securityContext"]["readOnlyRootFilesystem"]
    (claim,) = stateful["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOncePod"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
    user = dict(instructions())["USER"].split(":")[0]
    assert pod["securityContext"]["runAsUser"] == int(user)
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert labels == stateful["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
