"""Replicas on one store, behind the documented balancers: calls go on though replicas die."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from streams.cli.selftest.ledger import Story
from streams.cli.selftest.replicas.cluster import Cluster, Plan, cluster
from streams.cli.selftest.torture import APP
from streams.client.client import Client
from streams.exchange import Dialer
from tests.rigs.balancers import NAMES, Ports, balancer
from transports import dial

pytestmark = [
    pytest.mark.parametrize("scheme", ["http", "ws"]),
    pytest.mark.parametrize("name", NAMES),
]

PATIENCE_S = 90.0
LEASE_S = 1.0
COUNT = 60


@asynccontextmanager
async def balanced(name: str, scheme: str, folder: Path) -> AsyncIterator[tuple[Cluster, Dialer]]:
    """Three replicas, and how to connect to them through a balancer."""
    plan = Plan(folder / "cluster", APP, replicas=3, lease_s=LEASE_S)
    path = "mcp" if scheme == "http" else "ws"
    with trio.fail_after(PATIENCE_S):
        async with cluster(plan, Random(1)) as made:
            ports = [Ports(one.http, one.ws, one.admin) for one in made.replicas]
            with balancer(name, ports, folder) as port:
                yield made, dial(f"{scheme}://127.0.0.1:{port}/{path}")


def arguments(story: Story, folder: Path) -> dict[str, Any]:
    notes = folder / "notes"
    notes.mkdir()
    pace = {"per_second": 20, "flush_every": 5}
    return {"name": story.name, "count": story.count, "notes": str(notes), **pace}


def assert_complete(story: Story) -> None:
    assert story.is_finished
    assert (len(story.seen), story.twice, story.misordered, story.damaged) == (COUNT, 0, 0, 0)


async def test_a_call_goes_on_at_the_replica_that_is_left(
    name: str, scheme: str, tmp_path: Path
) -> None:
    story = Story("one", COUNT, "lasting")
    async with (
        balanced(name, scheme, tmp_path) as (made, dialer),
        Client(dialer) as client,
        client.call("lasting", arguments(story, tmp_path)) as call,
    ):
        async for message in call:
            story.look(message)
            if story.last in (10, 30):  # one of the two is its owner, or neither is
                await made.replicas[story.last // 20].kill()
        story.finish(await call.result())
    assert_complete(story)


async def test_any_replica_resumes_a_ticket_while_the_owner_goes_on(
    name: str, scheme: str, tmp_path: Path
) -> None:
    story = Story("one", COUNT, "work")  # it would end with its owner
    async with balanced(name, scheme, tmp_path) as (_, dialer):
        ticket = None
        while not story.is_finished:
            async with Client(dialer) as client:
                if ticket is None:
                    call = client.call("work", arguments(story, tmp_path))
                else:
                    call = client.resume(ticket)
                async with call:
                    until = story.last + 12
                    async for message in call:
                        story.look(message)
                        if story.last == until:
                            break
                    else:
                        story.finish(await call.result())
                ticket = call.ticket
    assert_complete(story)
