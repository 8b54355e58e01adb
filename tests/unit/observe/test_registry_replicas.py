"""The registry of one replica shows the calls of the others, as these know them."""

from collections.abc import AsyncIterator

import pytest
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Server
from streams.observe.registry import CallView, Registry, Wanted
from tests.rigs.replicas import Replica, Replicas, open_replicas
from tests.rigs.server import POSITIONS, Json, Talker, named

ASKING = Wanted(frozenset(["asking"]))
RUNNING = Wanted(frozenset(["running"]))


@pytest.fixture
async def replicas() -> AsyncIterator[Replicas]:
    def make() -> Server:
        return Server("tested", resume_min_s=0, resume_max_s=600, announce_after_s=0)

    async with open_replicas(make) as replicas:
        yield replicas


async def begun(replica: Replica, tool: str = "step") -> tuple[Talker, Json]:
    """A call that has asked its client, and its stream."""
    talker = await replica.dial(POSITIONS)
    stream = await talker.begin(1, tool)
    (replica.steps if tool == "step" else replica.again).ask()
    await talker.find(lambda message: message.get("method") == "elicitation/create")
    await wait_all_tasks_blocked()
    return talker, stream


def registry_of(replica: Replica) -> Registry:
    return Registry(replica.journal, replica.running.engine)


async def only(replica: Replica, wanted: Wanted | None = None) -> CallView:
    page = await registry_of(replica).calls(**({} if wanted is None else {"wanted": wanted}))
    [call] = page.calls
    return call


async def test_a_call_of_another_replica_is_as_that_one_knows_it(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    talker, stream = await begun(theirs)
    call = await only(ours)
    assert (call.state, call.owner, call.client_is_elsewhere) == ("asking", theirs.name, True)
    assert [each.method for each in call.questions] == ["elicitation/create"]
    assert not call.is_in_memory
    assert await only(ours, ASKING) == call
    assert not (await registry_of(ours).calls(wanted=RUNNING)).calls
    await talker.leave()
    await wait_all_tasks_blocked()
    assert (await registry_of(ours).call(stream["streamId"])).client_is_elsewhere is False


async def test_the_owner_knows_that_a_client_is_at_another_replica(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    talker, stream = await begun(theirs)
    await talker.leave()
    returned = await ours.dial(POSITIONS)
    await returned.ask(2, "stream/resume", **named(stream), after=0)
    await wait_all_tasks_blocked()
    assert ((await only(theirs)).client_is_elsewhere, (await only(theirs)).is_attached) == (
        True,
        False,
    )
    assert ((await only(ours)).client_is_elsewhere, (await only(ours)).is_attached) == (False, True)


async def test_what_a_silent_owner_does_not_tell_is_unknown(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    _, stream = await begun(theirs)
    theirs.reached.cut()
    call = await only(ours)
    assert (call.state, call.owner, call.client_is_elsewhere) == ("running", theirs.name, None)
    assert await registry_of(ours).call(stream["streamId"]) == call


async def test_a_call_that_no_replica_owns_does_not_run(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    await begun(theirs, "again")
    ours.reached.cut()  # else it would take the call over
    await theirs.stop()
    [call] = (await Registry(ours.reached.inner, ours.running.engine).calls()).calls
    assert (call.state, call.owner, call.client_is_elsewhere) == ("stopped", "", False)
