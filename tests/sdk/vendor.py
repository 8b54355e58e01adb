"""Starts clients that speak the two other proposals through an official SDK, and reads their
records.

`vendor_python.py` and `vendor_typescript.mjs` are such clients. They hold talks: sessions with
steps, one after another.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.sdk.cutting import Cut, Cutter, Seen
from tests.sdk.stock import QUIET_S, RUN_S, SECONDS, ClientProcess, Journey, Json, Node

PAGES: Final = 4  # of a tool that has them
STEP_S: Final = 15.0

_EXTENSION: Final = {"mcp-streams/v1": {"dialects": ["resumableRequests"]}}
# How a client can declare the dialect.
DECLARES: Final[dict[str, Json]] = {
    "a capability": {"resumableRequests": {}},
    "an experimental capability": {"experimental": _EXTENSION},
    "an extension": {"extensions": _EXTENSION},
}
DECLARED: Final = DECLARES["an extension"]  # which every SDK can send without changes
NEXT: Final = "mcp-streams/nextResumeToken"

Talks = dict[str, tuple[Json, Cutter]]  # by name, each with the proxy before it


class VendorClient(ClientProcess):
    """A client that holds all `talks` at once."""

    def __init__(
        self, name: str, node: Node, talks: Mapping[str, Json], *, stays: bool = False
    ) -> None:
        patience = {"stays": stays, "patience_s": STEP_S + SECONDS, "quiet_s": QUIET_S}
        super().__init__(name, node, "vendor", {"talks": list(talks.values()), **patience})
        self._names = list(talks)
        self._stays = stays

    def finish(self) -> dict[str, Json]:
        """Wait for the end; returns the records of each talk. A client that stays is killed in the
        middle.
        """
        assert self._process.stdout is not None
        printed = self._process.stdout.readline()
        if self._stays:
            self._process.kill()
        _, complaints = self._process.communicate(timeout=RUN_S)
        assert printed, complaints
        return dict(zip(self._names, json.loads(printed), strict=True))


@dataclass(frozen=True)
class Place:
    """The server's address for one client, and a folder of gates for each of its calls, by name."""

    port: int
    folder: Path

    def journey(self, name: str) -> Journey:
        gates = self.folder / name
        gates.mkdir(exist_ok=True)
        return Journey(gates)

    def talk(self, *steps: Json, declares: Json = DECLARED, port: int = 0) -> Json:
        """A session, directly or through a proxy's `port`."""
        url = f"http://127.0.0.1:{port or self.port}/mcp"
        return {"url": url, "declares": declares, "steps": list(steps)}

    def elsewhere(self, *steps: Json, port: int = 0, behind: bool = False) -> Json:
        """Another session of the same client, which knows the tokens that the first one has
        received.
        """
        return {"do": "elsewhere", "behind": behind, **self.talk(*steps, port=port)}

    def call(self, name: str) -> Json:
        """Start the call of this name, and do not wait for it."""
        return {"do": "call", "name": name, "behind": True, **self.journey(name).to(self.port)}

    def pages(self, name: str, tool: str = "rows", *, gated: bool = False, **more: Any) -> Json:
        """All pages, or those that `more` selects."""
        gates = str(self.journey(name).gates) if gated else ""
        given = {"pages": PAGES, "gates": gates}
        return {"do": "pages", "name": name, "tool": tool, "arguments": given, **more}

    def open(self, name: str) -> Json:
        """Let the call of this name go to its end."""
        journey = self.journey(name)
        paths = [str(journey.gates / str(gate)) for gate in range(1, journey.steps + 1)]
        return {"do": "touch", "paths": paths}


def request(method: str, name: str = "", **more: Any) -> Json:
    """One of the requests that no SDK knows."""
    return {"do": "request", "method": f"requests/{method}", "as": name or method, **more}


def hear(logs: int) -> Json:
    """Wait for a policy and so many log messages."""
    return {"do": "hear", "logs": logs}


LINGER: Final[Json] = {"do": "linger"}


class Network:
    """Puts a proxy of its own in front of each talk, for as long as the stack is open."""

    def __init__(self, place: Place, stack: contextlib.ExitStack) -> None:
        self.place = place
        self._stack = stack

    def talk(
        self,
        *steps: Json,
        cuts: tuple[Cut, ...] = (),
        on_cut: Callable[[int], None] = lambda _: None,
        declares: Json = DECLARED,
    ) -> tuple[Json, Cutter]:
        cutter = Cutter(self.place.port, cuts, on_cut=on_cut)
        self._stack.callback(cutter.close)
        return self.place.talk(*steps, declares=declares, port=cutter.port), cutter

    def finish(self, client: str, node: Node, talks: Talks) -> dict[str, "Found"]:
        """Have a client hold these talks."""
        wanted = {name: talk for name, (talk, _) in talks.items()}
        seen = self._stack.enter_context(VendorClient(client, node, wanted)).finish()
        return {name: Found(seen[name], cutter) for name, (_, cutter) in talks.items()}


@dataclass(frozen=True)
class Found:
    """The records of a talk: the client's, and the network's."""

    seen: Json
    cutter: Cutter

    def outcome(self, name: str) -> Any:
        """The result of a step."""
        outcome = self.seen["outcomes"][name]
        assert "error" not in outcome, outcome["error"]
        return outcome["result"]

    def error(self, name: str) -> Json:
        """The error of a step."""
        error: Json = self.seen["outcomes"][name]["error"]
        return error

    def progress(self) -> list[float]:
        return [progress for _, progress in self.seen["progress"]]

    def steps(self) -> list[int]:
        return [log["step"] for log in self.seen["logs"]]

    def continued(self) -> list[Seen]:
        """The requests by which the client continued a response."""
        return [seen for seen in self.cutter.requests if seen.last_event_id]

    def restless(self) -> list[Seen]:
        """The requests of that kind that it sent although it had the result."""
        return [seen for seen in self.cutter.requests_after_result if seen.last_event_id]


def on_pages(pages: list[Json]) -> list[Any]:
    """The contents of the pages that are not empty."""
    return [json.loads(block["text"]) for page in pages for block in page["content"]]
