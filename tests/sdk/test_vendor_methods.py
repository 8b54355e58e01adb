"""`requests/resume` and `requests/getStatus` through the official clients, which do not know them.

Where an SDK loses the response to a resume, its own `Last-Event-ID` brings it back, as for any
call.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from tests.sdk.cutting import WAIT_S, Cut, Cutter
from tests.sdk.stock import CLIENTS, HERE, Journey, Json, Node
from tests.sdk.vendor import (
    DECLARES,
    LINGER,
    PAGES,
    Found,
    Network,
    Place,
    Talks,
    VendorClient,
    hear,
    on_pages,
    request,
)
from tests.wire.process import ServerProcess

APP: Final = f"{HERE / 'requests_server.py'}:server"
MIN_S: Final = 0.2  # of that server
STEPS: Final = [1, 2, 3, 4]
LAST_SEQ: Final = 2 * len(STEPS) + 1
TEXT: Final = f"{len(STEPS)} steps"
RESULT: Final = {
    "content": [{"type": "text", "text": TEXT}],
    "structuredContent": {"result": TEXT},
}
ROWS: Final = [[f"{page}.1", f"{page}.2"] for page in range(1, PAGES + 1)]

# The places where the connections of a resume are cut, one after another. Its first message is the
# policy.
RESUMES: Final[dict[str, tuple[Cut, ...]]] = {
    "nowhere": (),
    "before the policy": (Cut(0),),
    "after some messages": (Cut(3),),
    "after some messages, reset": (Cut(3, is_reset=True),),
    "in the middle of a message": (Cut(3, more=30),),
    "in the middle of the result": (Cut(LAST_SEQ, more=30),),
    "before the GET is answered": (Cut(3), Cut(is_refusal=True)),
    "three times in a row": (Cut(3), Cut(1), Cut(1)),
}
TOO_SHORT: Final = "resumed for too short a time"
# Calls whose client is killed before it has the result.
LOST: Final = (*RESUMES, TOO_SHORT)
LOST_PAGE: Final = "a lost page"

GIVEN_UP: Final = "given up by the SDK"
# The client leaves after the third message of the call, and again after that of the resume.
GIVES_UP: Final = (Cut(3), Cut(is_refusal=True), Cut(is_refusal=True), Cut(3))
TAKEN_OVER: Final = "taken over by another session"
SPENT: Final = "nothing left"

# The installation of the clients has a bound of its own.
pytestmark = pytest.mark.timeout(200, func_only=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), app=APP) as server:
        yield server


@pytest.fixture(scope="module", params=CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def place(server: ServerProcess, client: str, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(server.http_port, tmp_path_factory.mktemp(client))


@pytest.fixture(scope="module")
def lost(client: str, place: Place, node: Node) -> dict[str, list[Json]]:
    """The policies of calls whose client was killed."""
    talks = {LOST_PAGE: place.talk(place.pages(LOST_PAGE, behind=True, gated=True), hear(logs=0))}
    for name in LOST:
        place.journey(name).open(1)
        talks[name] = place.talk(place.call(name), hear(logs=1))
    for name, declares in DECLARES.items():
        talks[name] = place.talk(place.call(name), hear(logs=0), declares=declares)
    with VendorClient(client, node, talks, stays=True) as gone:
        return {name: seen["policies"] for name, seen in gone.finish().items()}


@pytest.fixture(scope="module")
def found(client: str, place: Place, lost: dict[str, list[Json]], node: Node) -> dict[str, Found]:
    """Another client's records of these calls, and of calls of its own."""
    known = {name: policies[0] for name, policies in lost.items()}
    with contextlib.ExitStack() as stack:
        network = Network(place, stack)
        talks = {name: _resume(network, name, known[name]) for name in RESUMES}
        talks |= _lost_ones(network, known) | _its_own(network)
        return network.finish(client, node, talks)


def _opening(journey: Journey, cuts: tuple[Cut, ...]) -> Callable[[int], None]:
    """The actions after each cut: the tool goes on as far as the next one, or to its end."""

    def after(made: int) -> None:
        passing = sum(cut.events for cut in cuts[: made + 1])
        journey.open(len(STEPS) if made == len(cuts) else min(len(STEPS), (passing + 1) // 2))

    after(0)
    return after


def _token(policy: Json) -> Json:
    return {"resumeToken": policy["resumeToken"]}


def _request(policy: Json) -> Json:
    return {"requestId": policy["requestId"], **_token(policy)}


def _resume(network: Network, name: str, policy: Json) -> tuple[Json, Cutter]:
    """A resume as the session's first request, so its id is the call's own: the SDKs count ids."""
    return network.talk(
        request("resume", params=_token(policy)),
        request("getStatus", params={**_request(policy), "after": LAST_SEQ}),
        LINGER,
        cuts=RESUMES[name],
        on_cut=_opening(network.place.journey(name), RESUMES[name]),
    )


def _lost_ones(network: Network, known: dict[str, Json]) -> Talks:
    place, policy = network.place, known[TOO_SHORT]
    return {
        TOO_SHORT: network.talk(
            # It has the id of the call. A resume under that id would be cancelled with the call.
            request("getStatus", params=_request(policy)),
            request("resume", "in vain", params=_token(policy), timeout_s=MIN_S),
            request("getStatus", "still", params=_request(policy)),
            request("resume", params=_token(policy), behind=True),
            LINGER,
            place.open(TOO_SHORT),
            {"do": "await", "for": "resume"},
            LINGER,
        ),
        LOST_PAGE: network.talk(
            place.open(LOST_PAGE),
            request("resume", params=_token(known[LOST_PAGE])),
            place.pages(LOST_PAGE, to="resume", gated=True),
            cuts=(Cut(2),),
        ),
    }


def _its_own(network: Network) -> Talks:
    place = network.place
    for name, gates in {GIVEN_UP: 2, TAKEN_OVER: 1, SPENT: len(STEPS)}.items():
        place.journey(name).open(gates)
    return {
        GIVEN_UP: network.talk(
            place.call(GIVEN_UP),
            {"do": "lose", "for": "call"},
            place.open(GIVEN_UP),
            request("resume"),
            LINGER,
            cuts=GIVES_UP,
        ),
        TAKEN_OVER: network.talk(
            place.call(TAKEN_OVER),
            hear(logs=1),
            place.elsewhere(request("resume"), behind=True),
            {"do": "await", "for": "call"},
            LINGER,
            place.open(TAKEN_OVER),
            {"do": "await", "for": "elsewhere"},
        ),
        SPENT: network.talk(
            {**place.call(SPENT), "behind": False},
            hear(logs=len(STEPS)),
            request("getStatus", "of nobody's", params={"requestId": "nobody's"}),
            request("resume", "by a wrong token", params={"resumeToken": "x" * 43}),
            request("resume", "beyond the end", params={"after": LAST_SEQ + 1}),
            request("getStatus", "before the result", params={"after": LAST_SEQ - 1}),
            request("resume", "the result", params={"after": LAST_SEQ - 1}),
            request("resume", "nothing", params={"after": LAST_SEQ}),
        ),
    }


@pytest.mark.parametrize("declaration", DECLARES)
def test_a_client_that_declares_the_dialect_learns_the_token(
    lost: dict[str, list[Json]], declaration: str
) -> None:
    (policy,) = lost[declaration]
    assert set(policy) == {"requestId", "resumeToken", "minWait", "maxWait"}
    assert policy["minWait"] == MIN_S


every_cut = pytest.mark.parametrize("case", RESUMES)


@every_cut
def test_a_resume_is_answered_with_the_result_of_the_call(
    found: dict[str, Found], case: str
) -> None:
    assert found[case].outcome("resume") == RESULT
    assert found[case].cutter.cuts_left == 0
    assert found[case].cutter.results == 1


@every_cut
def test_a_resume_brings_the_notifications_once_and_in_order(
    found: dict[str, Found], case: str
) -> None:
    assert found[case].seen["progress"] == [[case, step] for step in STEPS]
    assert found[case].steps() == STEPS


@every_cut
def test_who_resumes_is_told_what_the_caller_was(
    found: dict[str, Found], lost: dict[str, list[Json]], case: str
) -> None:
    policies = found[case].seen["policies"]
    assert policies
    assert all(policy in lost[case] for policy in policies)


@every_cut
def test_a_client_that_has_its_result_is_at_peace(found: dict[str, Found], case: str) -> None:
    assert found[case].restless() == []


@every_cut
def test_what_is_over_says_so(
    found: dict[str, Found], lost: dict[str, list[Json]], case: str
) -> None:
    assert found[case].outcome("getStatus") == {
        "requestId": lost[case][0]["requestId"],
        "status": "completed",
        "hasPendingMessage": False,
        "hasInputRequest": False,
    }


def test_what_runs_says_so(found: dict[str, Found], lost: dict[str, list[Json]]) -> None:
    assert found[TOO_SHORT].outcome("getStatus") == {
        "requestId": lost[TOO_SHORT][0]["requestId"],
        "status": "processing",
        "hasPendingMessage": True,
        "hasInputRequest": False,
    }


def test_a_resume_brings_what_the_sdk_has_given_up(found: dict[str, Found]) -> None:
    """The resume is in the same session, and survives another cut."""
    call = found[GIVEN_UP]
    assert call.outcome("resume") == RESULT
    assert call.cutter.cuts_left == 0
    # The messages before the loss come again: the client has confirmed none of them.
    assert (call.steps(), call.progress()) == ([1, *STEPS], [1, *STEPS])
    assert call.restless() == []


def test_a_resume_that_ran_into_a_timeout_can_be_made_again(found: dict[str, Found]) -> None:
    """The SDK cancels the first resume. That only detaches it, and leaves the newer one alone."""
    call = found[TOO_SHORT]
    assert "timed out" in call.error("in vain")["message"].lower()
    assert call.outcome("still")["status"] == "processing"
    assert call.outcome("resume") == RESULT
    assert list(dict.fromkeys(call.steps())) == STEPS
    # It comes back once, after a second, to the response that it has cancelled.
    assert len(call.restless()) <= 1


def test_a_resume_elsewhere_takes_the_call_over(found: dict[str, Found]) -> None:
    """The stream stays there: the client that had it before does not resume it."""
    call = found[TAKEN_OVER]
    assert call.error("call")["data"] == {"reason": "superseded"}
    elsewhere = call.outcome("elsewhere")
    assert elsewhere["outcomes"]["resume"] == {"result": RESULT}
    assert [log["step"] for log in elsewhere["logs"]] == STEPS
    assert call.steps() == [1]


def test_a_client_is_told_why_it_gets_nothing(found: dict[str, Found]) -> None:
    call = found[SPENT]
    for unknown in ("of nobody's", "by a wrong token"):
        assert call.error(unknown)["data"] == {"reason": "stream_not_found"}
    ahead = {"reason": "cursor_ahead", "lastSeq": LAST_SEQ}
    assert call.error("beyond the end")["data"] == ahead
    gone = {"reason": "messages_gone", "earliestSeq": LAST_SEQ + 1}
    assert call.error("nothing")["data"] == gone


def test_a_client_may_say_what_it_has(found: dict[str, Found]) -> None:
    call = found[SPENT]
    assert call.outcome("before the result")["hasPendingMessage"] is True
    assert call.outcome("the result") == RESULT
    assert call.steps() == STEPS  # from the call itself, and no more


def test_a_lost_page_is_resumed_and_leads_on(found: dict[str, Found]) -> None:
    resumed = found[LOST_PAGE].outcome("resume")
    assert on_pages([resumed, *found[LOST_PAGE].outcome("pages")]) == ROWS
    assert found[LOST_PAGE].steps() == STEPS
    assert found[LOST_PAGE].cutter.cuts_left == 0


@pytest.fixture(scope="module")
def outlived(node: Node, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """Resumes of all clients, for which the server was killed in the middle of its response.

    The server was also down when they first came back.
    """
    folder = tmp_path_factory.mktemp("killed")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(folder, app=APP))
        place = Place(server.http_port, folder)
        place.journey("call").open(len(STEPS))
        cutters, running = {}, {}
        for client in CLIENTS:
            cutters[client] = Cutter(server.http_port, [Cut(3, is_held=True)])
            stack.callback(cutters[client].close)
            resume = place.elsewhere(request("resume"), LINGER, port=cutters[client].port)
            talk = place.talk({**place.call("call"), "behind": False}, hear(logs=4), resume)
            running[client] = stack.enter_context(VendorClient(client, node, {"": talk}))
        for cutter in cutters.values():
            assert cutter.held.wait(WAIT_S)
        server.kill()
        for cutter in cutters.values():
            cutter.let_go()
        for cutter in cutters.values():
            assert cutter.refused.wait(WAIT_S)
        server.start()
        for cutter in cutters.values():
            cutter.resume()
        seen = {client: running[client].finish()[""]["outcomes"] for client in CLIENTS}
    return {client: Found(seen[client]["elsewhere"]["result"], cutters[client]) for client in seen}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_resume_outlives_the_server(outlived: dict[str, Found], client: str) -> None:
    seen = outlived[client]
    assert seen.outcome("resume") == RESULT
    assert (seen.steps(), seen.progress()) == (STEPS, STEPS)
    assert (seen.restless(), seen.cutter.results) == ([], 1)
