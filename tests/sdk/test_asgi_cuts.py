"""The official Python client, cut off from a server in an ASGI application."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.rigs.asgi import AsgiServer
from tests.sdk.cutting import Cut, Cutter
from tests.sdk.stock import Journey, Node, StockClient

STEPS: Final = [1, 2, 3, 4]
ALL_MESSAGES: Final = 2 * len(STEPS)  # before the result

CASES: Final[dict[str, tuple[Cut, ...]]] = {
    "nowhere": (),
    "before the first event": (Cut(0),),
    "between events": (Cut(1),),
    "in the middle of an event": (Cut(1, more=30),),
    "in the middle of the result": (Cut(ALL_MESSAGES, more=30),),
    "before the GET is answered": (Cut(1), Cut(is_refusal=True)),
    "twice in a row": (Cut(1), Cut(1)),
}

# An ASGI server sends chunks, and an end within them is a failure for this client. It gives up at
# the third in a row, and keeps the id of a GET's last event only where that ends in good order.
REPEATED: Final = "twice in a row"


@pytest.fixture(scope="module", params=["uvicorn", "hypercorn-trio"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AsgiServer]:
    place = tmp_path_factory.mktemp("server")
    with AsgiServer(place, host=request.param, app="journeying") as server:
        yield server


def opening(journey: Journey, cuts: tuple[Cut, ...]) -> Callable[[int], None]:
    """The tool goes on by a step at each cut, and to its end after the last one."""
    return lambda made: journey.open(len(STEPS) if made == len(cuts) else made + 1)


def test_the_stock_client_is_cut_and_resumes(
    server: AsgiServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with contextlib.ExitStack() as stack:
        calls, cutters = [], []
        for cuts in CASES.values():
            journey = Journey(tmp_path_factory.mktemp("gates"))
            cutter = Cutter(server.port, cuts, on_cut=opening(journey, cuts))
            stack.callback(cutter.close)
            cutters.append(cutter)
            calls.append(journey.to(cutter.port))
            journey.open(len(STEPS) if not cuts or cuts[0].events > 1 else 1)
        no_node = Node(Path(), Path(sys.executable))
        seen = stack.enter_context(StockClient("python", no_node, calls)).finish()
    for case, one, cutter in zip(CASES, seen, cutters, strict=True):
        assert one["error"] is None, case
        assert one["result"] == f"{len(STEPS)} steps", case
        assert not cutter.cuts_left, case
        logged = [log["step"] for log in one["logs"]]
        for reported in (one["progress"], logged):
            assert list(dict.fromkeys(reported)) == STEPS, case
            assert len(reported) == len(STEPS) or case == REPEATED, case
