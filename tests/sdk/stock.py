"""Starts official clients, each in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

HERE: Final = Path(__file__).parent

# The generations of the official SDKs that speak HTTP.
CLIENTS: Final = ("python", "typescript-1", "typescript-2")

# More than three times as long as the server asks clients to wait before they resume.
QUIET_S: Final = 0.7

RUN_S: Final = 90.0

# For runs by hand: 10 makes each call take ten seconds longer, spread over its steps.
SECONDS: Final = float(os.environ.get("JOURNEY_S", "0"))

Json = dict[str, Any]


@dataclass(frozen=True)
class Node:
    """Node.js at `path`, and the folder `modules` with its packages."""

    modules: Path
    path: Path

    def environment(self, **more: str) -> dict[str, str]:
        """For a program that starts `node` by name."""
        path = f"{self.path.parent}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "NODE_NO_WARNINGS": "1", **more}

    def run(
        self, *arguments: str, cwd: Path = HERE, timeout_s: float = RUN_S, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a script to its end, which may be a failure."""
        return subprocess.run(
            [self.path, *arguments],
            cwd=cwd,
            env=self.environment(**environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


@dataclass(frozen=True)
class Journey:
    """A call of the tool in cut_server.py; its gates are files in a folder."""

    gates: Path
    steps: int = 4

    def open(self, upto: int) -> None:
        """Let the tool take so many of its steps."""
        for gate in range(1, upto + 1):
            (self.gates / str(gate)).touch()

    def to(self, port: int) -> Json:
        """The call for a client that reaches the server at this port."""
        arguments = {"gates": str(self.gates), "steps": self.steps, "seconds": SECONDS}
        return {"url": f"http://127.0.0.1:{port}/mcp", "tool": "journey", "arguments": arguments}


class ClientProcess:
    """One of `CLIENTS`, which runs a script with `given` as JSON; it is killed at the end."""

    def __init__(self, name: str, node: Node, script: str, given: Json) -> None:
        kind, _, generation = name.partition("-")
        command = {
            "python": [sys.executable, f"{script}_python.py"],
            "typescript": [str(node.path), f"{script}_typescript.mjs", generation],
        }[kind]
        self._process = subprocess.Popen(
            [*command, json.dumps(given)],
            cwd=HERE,
            env=node.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


class StockClient(ClientProcess):
    """A client that makes all `calls` at once."""

    def __init__(self, name: str, node: Node, calls: Sequence[Json]) -> None:
        patience_s = RUN_S / 2 + SECONDS
        given = {"calls": list(calls), "patience_s": patience_s, "quiet_s": QUIET_S}
        super().__init__(name, node, "stock", given)

    def finish(self) -> list[Json]:
        """Wait for the end; returns the client's record of each call."""
        printed, complaints = self._process.communicate(timeout=RUN_S + SECONDS)
        assert self._process.returncode == 0, complaints
        seen: list[Json] = json.loads(printed)
        return seen
