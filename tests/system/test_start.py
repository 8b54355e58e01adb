"""A command loads what it needs, and no more: hosts wait for it to start."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

LIMIT_S: Final = 60.0
SERVER: Final = "from streams import Server\nserver = Server('s')\n"
SERVE: Final = ("-m", "streams.cli", "serve", "app.py:server")

# Only other commands or other options need these.
RARE: Final = {
    "coredis",
    "importlib.metadata",
    "jwt",
    "mcp",
    "opentelemetry",
    "prometheus_client",
    "rich.markdown",
    "sqlite_utils",
    "standardwebhooks",
    "streams.admin.page.routes",
    "streams.backends.child",
    "streams.cli.calls",
    "streams.cli.wrap",
    "wsproto",
}
SLOW: Final = {"asyncio", "jsonschema_rs", "rich", "sqlite3", "structlog", "trio"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(SERVER)
    return tmp_path


def loaded(folder: Path, *words: str) -> set[str]:
    """The modules that a program loads until it ends, which it does at the end of its input."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *words],
        check=True,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=folder,
        stdin=subprocess.DEVNULL,
    )
    lines = done.stderr.splitlines()
    return {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}


def test_a_server_over_stdio_loads_no_transport_of_the_network(folder: Path) -> None:
    found = loaded(folder, *SERVE)
    assert "streams.server.running" in found
    assert found.isdisjoint(RARE | {"h11", "httptools"})


def test_a_server_opens_its_journal_again_without_the_migrations(folder: Path) -> None:
    words = (*SERVE, "--stdio", "--foreground", "--journal", "journal.db")
    assert "sqlite_utils" in loaded(folder, *words)
    assert loaded(folder, *words).isdisjoint(RARE)


def test_a_relay_loads_its_own_command_alone(folder: Path) -> None:
    found = loaded(folder, *SERVE, "--stdio", "--journal", "journal.db", "--linger", "0")
    assert "streams.process.relay" in found
    assert found.isdisjoint(RARE | SLOW)


def test_the_version_is_told_without_a_command(folder: Path) -> None:
    found = loaded(folder, "-m", "streams.cli", "--version")
    assert found.isdisjoint(RARE | SLOW - {"rich"} | {"streams.cli.serve"})


def test_a_client_needs_no_log_to_be_imported(folder: Path) -> None:
    found = loaded(folder, "-c", "from streams import Client")
    assert "trio" in found
    assert found.isdisjoint(RARE | SLOW - {"trio"})
