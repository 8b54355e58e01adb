"""Pages through the official clients: page tokens travel in `_meta`, which every SDK keeps.

Where an SDK loses a page, its own `Last-Event-ID` brings it back, as for any call.
"""

import contextlib
from collections.abc import Iterator
from typing import Final

import pytest

from tests.sdk.cutting import Cut
from tests.sdk.stock import CLIENTS, HERE, Node
from tests.sdk.vendor import DECLARED, LINGER, NEXT, PAGES, Found, Network, Place, Talks, on_pages
from tests.wire.process import ServerProcess

APP: Final = f"{HERE / 'requests_server.py'}:server"
NUMBERS: Final = list(range(1, PAGES + 1))
ROWS: Final = [[f"{page}.1", f"{page}.2"] for page in NUMBERS]

# One after another, where more of a response is to come; the last in the middle of a message.
PAGES_CUT: Final = (Cut(1), Cut(1), Cut(1), Cut(1, more=30))
PAGED: Final = {"whole": ({}, ()), "cut": ({}, PAGES_CUT), "announced": (DECLARED, ())}
EARLY: Final = "asked for too early"
GARBLED: Final = "asked for by a garbled token"

# The installation of the clients has a bound of its own.
pytestmark = pytest.mark.timeout(200, func_only=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), app=APP) as server:
        yield server


@pytest.fixture(scope="module", params=CLIENTS)
def found(
    request: pytest.FixtureRequest,
    server: ServerProcess,
    node: Node,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Found]:
    """A client's records of pages."""
    with contextlib.ExitStack() as stack:
        place = Place(server.http_port, tmp_path_factory.mktemp(request.param))
        network = Network(place, stack)
        return network.finish(request.param, node, _talks(network))


def _talks(network: Network) -> Talks:
    place = network.place
    talks = {
        name: network.talk({"do": "list"}, place.pages(name), LINGER, cuts=cuts, declares=declares)
        for name, (declares, cuts) in PAGED.items()
    }
    return talks | {
        EARLY: network.talk(
            {"do": "list"},
            place.pages(EARLY, "counts", gated=True, at_most=1, **{"as": "too early"}),
            place.open(EARLY),
            place.pages(EARLY, "counts", gated=True, to="too early"),
            declares={},
        ),
        GARBLED: network.talk(place.pages(GARBLED, token="x" * 43), declares={}),
    }


every_pages = pytest.mark.parametrize("case", PAGED)


@every_pages
def test_pages_come_whole_and_in_order(found: dict[str, Found], case: str) -> None:
    assert on_pages(found[case].outcome("pages")) == ROWS
    assert found[case].steps() == NUMBERS
    # The pages that were made ahead have no progress: no call waited for them.
    progress = found[case].progress()
    assert progress[0] == 1
    assert progress == sorted(set(progress) & set(NUMBERS))
    _, cuts = PAGED[case]
    assert len(found[case].continued()) == len(cuts)


@every_pages
def test_only_the_last_page_leads_nowhere(found: dict[str, Found], case: str) -> None:
    *leading, last = found[case].outcome("pages")
    for page in leading:
        token = page["_meta"][NEXT]
        assert page.get("nextResumeToken", token) == token  # which an SDK may drop
        assert page["_meta"]["mcp-streams/resumeTtl"] > 0
    assert NEXT not in last.get("_meta", {})
    assert "nextResumeToken" not in last


@every_pages
def test_pages_are_announced_to_whoever_declares(found: dict[str, Found], case: str) -> None:
    declares, _ = PAGED[case]
    assert len(found[case].seen["policies"]) == len(declares)


def test_a_page_that_is_not_ready_is_empty(found: dict[str, Found]) -> None:
    """This holds also for a tool that yields objects: an SDK would look for the promised object."""
    (empty,) = found[EARLY].outcome("too early")
    assert empty["content"] == []
    counts = on_pages(found[EARLY].outcome("pages"))
    assert counts == [{"page": page} for page in NUMBERS]


def test_a_garbled_token_is_refused(found: dict[str, Found]) -> None:
    error = found[GARBLED].error("pages")
    assert (error["code"], error["data"]) == (-32602, {"reason": "invalid_token"})


def test_the_listing_says_how_long_a_tool_takes(found: dict[str, Found]) -> None:
    listed = found["whole"].outcome("list")
    assert listed["rows"] == {"mcp-streams/expectedSeconds": 2.5}
