"""The operator's endpoint tells balancers whether the process lives and is ready."""

import pytest

from streams.admin.endpoint import AdminEndpoint
from streams.admin.gate import TokenGate
from streams.admin.health import LIVE_PATH, READY_PATH, Health, health_routes
from tests.rigs.operators import Answered, asked_of


async def asked(health: Health, path: str, method: str = "GET") -> Answered:
    """Ask as a balancer does: without a token, which the server does not even have."""
    return await asked_of(AdminEndpoint(TokenGate(None), health_routes(health)), path, method)


async def test_a_process_lives_before_it_is_ready() -> None:
    health = Health()
    assert (await asked(health, LIVE_PATH)).status == 200
    unready = await asked(health, READY_PATH)
    assert (unready.status, unready.body) == (503, b"starting\n")


async def test_it_is_ready_as_long_as_the_server_is() -> None:
    health, reason = Health(), [""]
    health.why_not = lambda: reason[0]
    ready = await asked(health, READY_PATH)
    assert (ready.status, ready.body) == (200, b"ok\n")
    assert ready.headers["content-type"].startswith("text/plain")
    reason[0] = "the journal takes no commits:\nLOADING"
    unready = await asked(health, READY_PATH)
    assert (unready.status, unready.body) == (503, b"the journal takes no commits: LOADING\n")
    reason[0] = ""
    assert (await asked(health, READY_PATH)).status == 200


async def test_from_the_begin_of_a_shutdown_it_is_not_ready_and_lives() -> None:
    health = Health()
    health.why_not = str
    health.drain()
    assert (await asked(health, READY_PATH)).body == b"shutting down\n"
    assert (await asked(health, LIVE_PATH)).status == 200


async def test_a_shutdown_alone_is_404_to_those_who_ask_for_it() -> None:
    health, reason = Health(), [""]
    health.why_not = lambda: reason[0]
    path = f"{READY_PATH}?draining=404"
    assert (await asked(health, path)).status == 200
    reason[0] = "the journal takes no commits"
    assert (await asked(health, path)).status == 503
    health.drain()
    draining = await asked(health, path)
    assert (draining.status, draining.body) == (404, b"shutting down\n")
    assert (await asked(health, READY_PATH)).status == 503


async def test_another_status_is_refused() -> None:
    refused = await asked(Health(), f"{READY_PATH}?draining=200")
    assert refused.status == 400
    assert "draining" in refused.json["error"]["message"]


@pytest.mark.parametrize("path", [LIVE_PATH, READY_PATH])
async def test_only_get_and_head_are_answered(path: str) -> None:
    health = Health()
    refused = await asked(health, path, "POST")
    assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD")
    assert (await asked(health, path, "HEAD")).status == (await asked(health, path)).status


@pytest.mark.parametrize("path", ["/", "/health", "/health/ready/", "/mcp", "/HEALTH/LIVE"])
async def test_other_paths_are_unknown(path: str) -> None:
    assert (await asked(Health(), path)).status == 404


async def test_paths_that_may_come_are_unavailable_while_the_server_starts() -> None:
    endpoint = AdminEndpoint(TokenGate(None), health_routes(Health()))
    endpoint.is_starting = True
    assert (await asked_of(endpoint, "/api/stats")).status == 503
    assert (await asked_of(endpoint, LIVE_PATH)).status == 200
