"""HAProxy and nginx as docs/operate/replicas has them, but for the ports, in front of replicas."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.rigs import ROOT
from tests.rigs.doc_pages import free_port
from tests.rigs.needing import needed
from tests.sdk.proxies import NGINX_FRAME, running

FOLDER: Final = ROOT / "docs" / "operate" / "replicas"
NAMES: Final = ("haproxy", "nginx")
PATIENCE_S: Final = 30


class Ports(NamedTuple):
    """The ports of one replica."""

    http: int
    ws: int
    admin: int


@contextlib.contextmanager
def patient_haproxy(replicas: Sequence[Ports], at: Ports, folder: Path) -> Iterator[None]:
    """Run HAProxy in front of three replicas, with a port for each transport.

    No replica is too slow for it: its tests are about what clients see, on any machine.
    """
    configuration = folder / "haproxy.cfg"
    text = haproxy(replicas, at.http).replace("if { path_beg /ws }", f"if {{ dst_port {at.ws} }}")
    text = text.replace(f":{at.http}\n", f":{at.http}\n    bind 127.0.0.1:{at.ws}\n")
    for timeout in ("timeout check 400ms", "timeout connect 500ms"):
        assert timeout in text
        text = text.replace(timeout, f"{timeout.rpartition(' ')[0]} {PATIENCE_S}s")
    configuration.write_text(text)
    program = needed("haproxy", "serve behind it")
    command = [program, "-db", "-f", str(configuration)]
    with running(command, at.http, folder / "haproxy.log"):
        yield


@contextlib.contextmanager
def balancer(name: str, replicas: Sequence[Ports], folder: Path) -> Iterator[int]:
    """Run a balancer in front of three replicas; yields its port."""
    program = needed(name, "serve behind it")
    port = free_port()
    if name == "haproxy":
        configuration = folder / "haproxy.cfg"
        configuration.write_text(haproxy(replicas, port))
        command = [program, "-db", "-f", str(configuration)]
    else:
        configuration = folder / "nginx.conf"
        documented = nginx(replicas, port)
        configuration.write_text(NGINX_FRAME.format(folder=folder, documented=documented))
        command = [program, "-e", "stderr", "-p", str(folder), "-c", str(configuration)]
    with running(command, port, folder / f"{name}.log"):
        yield port


def haproxy(replicas: Sequence[Ports], port: int) -> str:
    """The documented HAProxy, with these ports and without TLS."""
    changes = {
        "bind :443 ssl crt /etc/ssl/mcp.pem alpn http/1.1 ssl-min-ver TLSv1.2": (
            f"bind 127.0.0.1:{port}"
        ),
        "check port 9090": "check",
    }
    for number, at in enumerate(replicas, 1):
        changes[f"replica-{number}:8080"] = f"127.0.0.1:{at.http} port {at.admin}"
        changes[f"replica-{number}:8765"] = f"127.0.0.1:{at.ws}"
    return _changed(FOLDER / "haproxy.cfg", changes)


def nginx(replicas: Sequence[Ports], port: int) -> str:
    """The documented nginx, with these ports and without TLS."""
    changes = {
        "listen 443 ssl;": f"listen 127.0.0.1:{port};",
        "ssl_certificate /etc/ssl/mcp.pem;": "",
        "ssl_certificate_key /etc/ssl/mcp.key;": "",
    }
    for number, at in enumerate(replicas, 1):
        changes[f"replica-{number}:8080"] = f"127.0.0.1:{at.http}"
        changes[f"replica-{number}:8765"] = f"127.0.0.1:{at.ws}"
    return _changed(FOLDER / "nginx.conf", changes)


def _changed(path: Path, changes: dict[str, str]) -> str:
    text = path.read_text()
    for written, meant in changes.items():
        assert written in text, f"{written} is to be in {path.name}"
        text = text.replace(written, meant)
    return text
