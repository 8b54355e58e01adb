"""A question whose client leaves without an answer is told once, unless a client soon returns."""

import trio
from trio.testing import MockClock

from streams import Server
from streams.engine.absence import RETURN_S
from streams.journal.memory import MemoryJournal
from tests.rigs.server import House, Json, Steps, Talker, named, open_house
from tests.rigs.webhooks import URL, Inbox, queue, sending, virtual

ANSWER: Json = {"result": {"action": "decline"}}


def restartable() -> tuple[Server, Steps]:
    server = Server("steps", resume_min_s=0)
    return server, Steps(server, restart=True)


async def begun(house: House, steps: Steps) -> tuple[Talker, Json]:
    """A client with a call whose question it has."""
    talker = await house.dial()
    stream = await talker.begin(1, "step")
    steps.ask()
    await talker.question()
    return talker, stream


async def returned(house: House, stream: Json) -> Talker:
    """A client that resumes the call, and has its question again."""
    talker = await house.dial()
    await talker.ask("r", "stream/resume", **named(stream))
    await talker.question()
    return talker


async def waiting(house: House) -> list[float]:
    """How many seconds the webhooks of the journal still have to wait."""
    return [each.due_at - virtual() for each in await house.journal.webhooks(limit=99)]


async def test_it_is_told_once_its_client_stays_away(autojump_clock: MockClock) -> None:
    server, steps = restartable()
    async with open_house(server, hooks=(hooks := queue(URL, clock=virtual))) as house:
        talker, stream = await begun(house, steps)
        await trio.sleep(100)
        assert await waiting(house) == [], "its client has the question"
        inbox = Inbox()
        async with sending(house.journal, inbox.post, hooks):
            await talker.leave()
            await trio.sleep(RETURN_S - 2)
            assert inbox.received == []
            await trio.sleep(100)
            assert len(inbox.received) == 1
            assert b'"call.question"' in inbox.received[0][3]
            for _ in range(2):  # it is the same question still
                again = await returned(house, stream)
                await again.leave()
                await trio.sleep(100)
            assert len(inbox.received) == 1


async def test_it_is_not_told_if_its_client_returns_and_then_leaves_it_is(
    autojump_clock: MockClock,
) -> None:
    server, steps = restartable()
    async with open_house(server, hooks=queue(URL, clock=virtual)) as house:
        talker, stream = await begun(house, steps)
        await talker.leave()
        [due_s] = await waiting(house)
        assert 0 < due_s <= RETURN_S
        again = await returned(house, stream)
        await trio.sleep(1)
        assert await waiting(house) == []
        await again.leave()
        assert len(await waiting(house)) == 1


async def test_it_is_not_told_if_it_is_over_before_that(autojump_clock: MockClock) -> None:
    """Answered from another connection, no longer asked, or of a call that is cancelled."""
    server, steps = restartable()
    async with open_house(server, hooks=queue(URL, clock=virtual)) as house:
        talker, _ = await begun(house, steps)
        other = await house.dial()
        await talker.leave()
        assert len(await waiting(house)) == 1
        question = next(m for m in talker.seen if m.get("method") == "elicitation/create")
        await other.say({"id": question["id"], **ANSWER})
        await trio.sleep(1)
        assert await waiting(house) == []
        steps.finish()
        await trio.sleep(1)
        [due_s] = await waiting(house)
        assert due_s <= 0, "this is the end of the call"


async def test_a_call_that_ends_has_no_question(autojump_clock: MockClock) -> None:
    server, steps = restartable()
    async with open_house(server, hooks=queue(URL, clock=virtual)) as house:
        talker, _ = await begun(house, steps)

        async def ask_and_end(call: object) -> str:
            with trio.move_on_after(5):
                await steps.call.request("elicitation/create", {"message": "second"})
            return "no answer"

        await talker.say({"id": talker.seen[-1]["id"], **ANSWER})
        steps.do(ask_and_end)
        await talker.question()
        await talker.leave()
        assert len(await waiting(house)) == 1
        await trio.sleep(5)
        [webhook] = await house.journal.webhooks(limit=99)
        assert b'"call.completed"' in webhook.body


async def restarted(journal: MemoryJournal) -> list[float]:
    """The webhooks that wait after a restart of a server whose client stays away."""
    server, steps = restartable()
    steps.ask()
    async with open_house(server, journal=journal, hooks=queue(URL, clock=virtual)) as house:
        await trio.sleep(2)
        return await waiting(house)


async def test_it_is_told_after_a_crash(autojump_clock: MockClock) -> None:
    server, steps = restartable()
    async with open_house(server, hooks=queue(URL, clock=virtual)) as house:
        await begun(house, steps)
        crashed = house.as_after_a_crash()
    [due_s] = await restarted(crashed)
    assert 0 < due_s <= RETURN_S


async def test_a_client_that_returns_after_a_restart_leaves_nothing_to_tell(
    autojump_clock: MockClock,
) -> None:
    server, steps = restartable()
    async with open_house(server, hooks=queue(URL, clock=virtual)) as house:
        _, stream = await begun(house, steps)
        journal = house.journal
    server, steps = restartable()
    steps.ask()
    async with open_house(server, journal=journal, hooks=queue(URL, clock=virtual)) as house:
        [due_s] = await waiting(house)
        assert 0 < due_s <= RETURN_S, "the first process has left it"
        await returned(house, stream)
        await trio.sleep(1)
        assert await waiting(house) == []


async def test_a_restart_in_good_order_does_not_tell_it_again(autojump_clock: MockClock) -> None:
    server, steps = restartable()
    hooks, inbox = queue(URL, clock=virtual), Inbox()
    async with open_house(server, hooks=hooks) as house:
        talker, _ = await begun(house, steps)
        async with sending(house.journal, inbox.post, hooks):
            await talker.leave()
            await trio.sleep(100)
            assert len(inbox.received) == 1
        journal = house.journal
    assert isinstance(journal, MemoryJournal)
    for _ in range(2):
        assert await restarted(journal) == []
