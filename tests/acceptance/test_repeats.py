"""Calls whose connection is cut before the first byte of the answer, over every transport.

The server is a process of its own. Each call runs once, and its result arrives.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from streams.client.client import Client
from streams.errors import CallFailed, CallLost
from tests.acceptance.calls import numbers, text
from tests.acceptance.ways import APP, KINDS, Listening, Served, way_to
from tests.rigs.cutting import Cutting
from tests.wire.process import Gate, ServerProcess, gate_in

CUTS = 3  # each is followed by a longer pause


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ServerProcess(tmp_path_factory.mktemp("server"), app=APP) as process:
        yield Listening(process, APP)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with gate_in(tmp_path / "gate") as gate:
        yield gate


@pytest.mark.parametrize(
    ("kind", "is_sent", "is_plain"), list(itertools.product(KINDS, [True, False], [True, False]))
)
async def test_a_call_runs_once_however_often_its_connection_goes_first(
    served: Served, gate: Gate, kind: str, *, is_sent: bool, is_plain: bool
) -> None:
    options = {"dialects": ()} if is_plain else {}
    async with way_to(served, kind) as way:
        cutting = Cutting(way, CUTS, is_sent=is_sent)

        async def cut() -> None:
            if is_sent and cutting.cuts_left == CUTS - 1:
                await trio.to_thread.run_sync(gate.wait_for, "sent")
            way.cut()

        cutting.then = cut
        async with (
            Client(cutting, **options) as client,
            client.call("count", {"n": 3, "gate": gate.path}) as call,
        ):
            gate.release()
            if not is_plain:
                assert await numbers(call) == [1, 2, 3]
            assert await text(call) == "counted 3"
        assert cutting.connections == CUTS + 1
    assert gate.marks() == ([] if is_sent else ["sent"]), "there was one run"


@pytest.mark.parametrize("kind", KINDS)
async def test_many_calls_over_cut_connections_run_once_each(
    served: Served, gate: Gate, kind: str
) -> None:
    found = []

    async def follow(client: Client) -> None:
        async with client.call("count", {"n": 3, "gate": gate.path}) as call:
            assert await numbers(call) == [1, 2, 3]
            found.append(await text(call))

    async with way_to(served, kind) as way:
        cutting = Cutting(way, CUTS)

        async def cut() -> None:
            way.cut()

        cutting.then = cut
        async with Client(cutting) as client, trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(follow, client)
            gate.release(20)
    assert found == ["counted 3"] * 20
    for _ in range(20):
        gate.wait_for("sent")
    assert gate.marks() == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_was_killed_meanwhile_does_not_run_the_call_again(
    served: Served, gate: Gate, kind: str
) -> None:
    async with way_to(served, kind) as way:
        cutting = Cutting(way, 1)

        async def kill() -> None:
            await trio.to_thread.run_sync(gate.wait_for, "sent")
            way.cut()
            await trio.to_thread.run_sync(served.restart)

        cutting.then = kill
        async with (
            Client(cutting) as client,
            client.call("count", {"n": 3, "gate": gate.path}) as call,
        ):
            assert await numbers(call) == [1, 2, 3]
            with pytest.raises(CallFailed) as caught:
                await call.result()
    assert caught.value.data == {"reason": "interrupted"}
    assert gate.marks() == []


@pytest.mark.parametrize(("kind", "is_sent"), list(itertools.product(KINDS, [True, False])))
async def test_a_call_without_a_key_is_lost_and_not_run_twice(
    served: Served, gate: Gate, kind: str, *, is_sent: bool
) -> None:
    async with way_to(served, kind) as way:
        cutting = Cutting(way, 1, is_sent=is_sent)

        async def cut() -> None:
            if is_sent:
                await trio.to_thread.run_sync(gate.wait_for, "sent")
            way.cut()

        cutting.then = cut
        async with Client(cutting, idempotency_keys=False) as client:
            async with client.call("count", {"n": 3, "gate": gate.path}) as call:
                with pytest.raises(CallLost):
                    await call.result()
            gate.release(2)
            async with client.call("count", {"n": 2, "gate": gate.path}) as call:
                assert await numbers(call) == [1, 2]
                assert await text(call) == "counted 2"
        assert cutting.connections == 2
    gate.wait_for("sent")
    assert gate.marks() == [], "each call was run once, or not at all"
