"""nginx and HAProxy as real processes, with the files of docs/operate/single."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tests.rigs import ROOT
from tests.rigs.doc_pages import free_port

FILES: Final = ROOT / "docs" / "operate" / "single"
START_S: Final = 30.0
POLL_S: Final = 0.02
_HAPROXY_TLS: Final = " ssl crt /etc/ssl/mcp.pem alpn http/1.1 ssl-min-ver TLSv1.2"

# The frame for the documented file: one process, all files in its folder.
NGINX_FRAME: Final = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/client;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {documented}
}}
"""


@contextlib.contextmanager
def nginx_before(
    server_port: int,
    nginx: str,
    folder: Path,
    hardened: "Hardened | None" = None,
    port: int | None = None,
) -> Iterator[int]:
    """Run an nginx in front of the server at `server_port`; yields its port, free by default."""
    port = free_port() if port is None else port
    if hardened is None:
        changes = {
            "listen 443 ssl;": f"listen 127.0.0.1:{port};",
            "ssl_certificate /etc/ssl/mcp.pem;": "",
            "ssl_certificate_key /etc/ssl/mcp.key;": "",
        }
    else:
        changes = {
            "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
            "/etc/ssl/mcp.pem": str(hardened.certificate),
            "/etc/ssl/mcp.key": str(hardened.certificate),
            "127.0.0.1:8765": f"127.0.0.1:{hardened.ws_port}",
        }
    documented = _documented("nginx.conf", server_port, changes)
    configuration = folder / "nginx.conf"
    configuration.write_text(NGINX_FRAME.format(folder=folder, documented=documented))
    command = [nginx, "-e", "stderr", "-p", str(folder), "-c", str(configuration)]
    with running(command, port, folder / "nginx.log"):
        yield port


@contextlib.contextmanager
def haproxy_before(
    server_port: int,
    haproxy: str,
    folder: Path,
    hardened: "Hardened | None" = None,
    port: int | None = None,
) -> Iterator[int]:
    """Run an HAProxy in front of the server at `server_port`; yields its port, free by default."""
    port = free_port() if port is None else port
    if hardened is None:
        changes = {f"bind :443{_HAPROXY_TLS}": f"bind 127.0.0.1:{port}"}
    else:
        changes = {
            "bind :443": f"bind 127.0.0.1:{port}",
            "/etc/ssl/mcp.pem": str(hardened.certificate),
            "127.0.0.1:8765": f"127.0.0.1:{hardened.ws_port}",
        }
    documented = _documented("haproxy.cfg", server_port, changes)
    configuration = folder / "haproxy.cfg"
    configuration.write_text(documented)
    with running([haproxy, "-db", "-f", str(configuration)], port, folder / "haproxy.log"):
        yield port


class Hardened(NamedTuple):
    """The settings of a proxy that ends TLS and forwards a WebSocket, too."""

    certificate: Path
    ws_port: int


def _documented(file: str, server_port: int, changes: dict[str, str]) -> str:
    """The documented file, with the addresses of a test."""
    text = (FILES / file).read_text()
    for written, meant in {"127.0.0.1:8080": f"127.0.0.1:{server_port}", **changes}.items():
        assert written in text, f"{written} is to be in {file}"
        text = text.replace(written, meant)
    return text


@contextlib.contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[None]:
    """Run a proxy until it is killed; begins when it listens at `port`."""
    started = time.monotonic()
    with log.open("wb") as complaints:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=complaints, stderr=complaints
        )
        try:
            while not _is_listening(port):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < started + START_S, log.read_text()
                time.sleep(POLL_S)
            yield
        finally:
            process.kill()
            process.wait()


def _is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), START_S).close()
    except ConnectionRefusedError:
        return False
    return True
