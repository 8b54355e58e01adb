"""Posts to an owner that are lost: with the owner, or by a store that has gone back.

A client was told that they are on their way, and need not repeat them.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Limits, Server
from streams.engine import posts
from streams.engine.connection import SILENCE_S
from streams.journal.contract import Post
from streams.journal.records import Outcome
from tests.rigs import idempotency
from tests.rigs.replicas import TAKEN_S, Replica, Replicas, open_replicas
from tests.rigs.server import POSITIONS, STREAMS, Json, Talker, named, said
from tests.rigs.shared_memory import LEASE_S
from tests.rigs.web import Answer, Browser

MAX_S = 600.0
UNSENT_MAX = 10


def make() -> Server:
    settings: Any = {"resume_min_s": 0, "resume_max_s": MAX_S, "announce_after_s": 0}
    return Server("tested", limits=Limits(unsent_entries_max=UNSENT_MAX), **settings)


@pytest.fixture
async def replicas() -> AsyncIterator[Replicas]:
    async with open_replicas(make) as replicas:
        yield replicas


@contextmanager
def dropping(replicas: Replicas, drops: Callable[[object], bool]) -> Iterator[None]:
    """The store loses these posts, and nobody hears of that."""
    store = replicas.store
    keep = store.keep_posts

    def keep_some(replica: str, given: Sequence[Post]) -> None:
        keep(replica, [each for each in given if not drops(posts.decode(each.body))])

    store.keep_posts = keep_some  # type: ignore[method-assign]
    try:
        yield
    finally:
        store.keep_posts = keep  # type: ignore[method-assign]


@contextmanager
def losing(replicas: Replicas, *kinds: type) -> Iterator[None]:
    """The store loses posts of these kinds; then all replicas hear that news were lost."""
    with dropping(replicas, lambda post: isinstance(post, kinds)):
        yield
    for journal in replicas.store.listeners:
        journal.lose_news()


def is_published(post: object) -> bool:
    """Whether it tells the position of a client, and is not stored."""
    return isinstance(post, posts.Moved) and not post.is_kept


def commit_nothing_more(replica: Replica) -> None:
    """The store is slow for this replica, until that is killed."""

    async def commit(_: Any) -> Any:
        await trio.sleep_forever()

    replica.reached.commit = commit  # type: ignore[attr-defined]


async def asked_over_http(ours: Replica, theirs: Replica) -> tuple[Browser, Answer, Json]:
    """A call of `theirs` has asked a client, who goes on at `ours`. Returns what it will say."""
    browser = await theirs.browse(STREAMS)
    call = await browser.call(1, "again")
    theirs.again.ask()
    await wait_all_tasks_blocked()
    asked = call.events[-1][1]
    assert asked is not None
    await call.hang_up()
    elsewhere = await ours.browse(STREAMS, browser.session)
    back = await elsewhere.go_on(call.ids[-1])
    await trio.sleep(LEASE_S)
    return elsewhere, back, {"jsonrpc": "2.0", "id": asked["id"], "result": {"says": "yes"}}


async def resumed(replica: Replica, stream: Json) -> Talker:
    """A client of this replica that follows the stream from its begin."""
    talker = await replica.dial(POSITIONS)
    await talker.ask("resume", "stream/resume", **named(stream), after=0)
    return talker


def outcome_of(replicas: Replicas) -> Outcome:
    """That of the only call."""
    [record] = replicas.store.records.values()
    return record.outcome


# With the owner


async def heir_of(owner: Replica, others: Sequence[Replica]) -> Replica:
    """Kill the owner of a call; the one of the others that has it then."""
    owner.kill()
    await trio.sleep(2 * TAKEN_S)
    [heir] = [each for each in others if each.streams]
    return heir


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("heirs", [1, 2])
async def test_an_answer_is_given_to_the_heir_of_an_owner_that_had_it(
    replicas: Replicas, autojump_clock: MockClock, *, stays: bool, heirs: int
) -> None:
    """The owner dies before the answer is durable, whether its client is still there or not."""
    ours, theirs = await replicas.two()
    browser, back, said = await asked_over_http(ours, theirs)
    others = [ours, *[await replicas.start() for _ in range(1, heirs)]]
    if not stays:
        await back.hang_up()
    commit_nothing_more(theirs)
    assert (await browser.fetch("POST", said)).status == 202
    await wait_all_tasks_blocked()
    heir = await heir_of(theirs, others)
    heir.again.ask()  # the same question again
    heir.again.finish()
    await trio.sleep(LEASE_S)
    assert heir.again.answers == [{"says": "yes"}]
    assert outcome_of(replicas) is Outcome.COMPLETED


@pytest.mark.parametrize("heirs", [1, 2])
async def test_a_cancel_is_given_to_the_heir_of_an_owner_that_had_it(
    replicas: Replicas, autojump_clock: MockClock, heirs: int
) -> None:
    ours, theirs = await replicas.two()
    browser, _, _ = await asked_over_http(ours, theirs)
    for _ in range(1, heirs):
        await replicas.start()
    commit_nothing_more(theirs)
    assert (await browser.tell("notifications/cancelled", requestId=1)).status == 202
    await wait_all_tasks_blocked()
    theirs.kill()
    await trio.sleep(2 * TAKEN_S)
    assert outcome_of(replicas) is Outcome.CANCELLED


async def test_a_cancel_reaches_the_replica_that_it_came_to_if_that_is_the_heir(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """The delivery that is cancelled has moved there from the dead owner."""
    ours, theirs = await replicas.two()
    browser, _, _ = await asked_over_http(ours, theirs)
    theirs.kill()
    assert (await browser.tell("notifications/cancelled", requestId=1)).status == 202
    await trio.sleep(TAKEN_S)
    assert outcome_of(replicas) is Outcome.CANCELLED


async def test_a_cancel_reaches_an_heir_that_knows_neither_its_session_nor_the_call_yet(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """It comes to a third replica after the owner's death."""
    theirs, heir = await replicas.two()
    browser = await theirs.browse(STREAMS)
    call = await browser.call(1, "again")
    other = await browser.call(2, "again")
    await trio.sleep(LEASE_S)
    theirs.kill()
    await call.hang_up()
    await other.hang_up()
    third = await replicas.start()
    elsewhere = await third.browse(STREAMS, browser.session)
    assert (await elsewhere.tell("notifications/cancelled", requestId=1)).status == 202
    await trio.sleep(2 * TAKEN_S)
    records = sorted(replicas.store.records.values(), key=lambda each: each.number)
    assert [each.outcome for each in records] == [Outcome.CANCELLED, Outcome.LIVE]
    assert (await elsewhere.tell("notifications/cancelled", requestId=2)).status == 202
    await trio.sleep(LEASE_S)
    assert not heir.running.running_tools
    assert not third.running.running_tools


@pytest.mark.parametrize("is_cancel", [False, True])
async def test_an_owner_that_was_cut_off_passes_on_what_its_client_has_told(
    replicas: Replicas, autojump_clock: MockClock, *, is_cancel: bool
) -> None:
    """It has lost the call, and does not know that yet."""
    ours, theirs = await replicas.two()
    browser = await theirs.browse(STREAMS)
    call = await browser.call(1, "again")
    theirs.again.ask()
    await trio.sleep(LEASE_S)
    asked = call.events[-1][1]
    assert asked is not None
    theirs.reached.cut()
    await trio.sleep(LEASE_S / 2)
    told: Json = {"id": asked["id"], "result": {"says": "yes"}}
    if is_cancel:
        told = {"method": "notifications/cancelled", "params": {"requestId": 1}}
    answer = browser.ask("POST", {"jsonrpc": "2.0"} | told)
    await trio.sleep(TAKEN_S - LEASE_S / 2)
    assert answer.status == 0
    theirs.reached.mend()
    await trio.sleep(LEASE_S)
    assert answer.status == 202
    ours.again.ask()
    ours.again.finish()
    await trio.sleep(LEASE_S)
    assert ours.again.answers == ([] if is_cancel else [{"says": "yes"}])
    assert outcome_of(replicas) is (Outcome.CANCELLED if is_cancel else Outcome.COMPLETED)


# By a store that has gone back


async def test_an_answer_that_the_store_has_lost_is_given_again(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    browser, _, said = await asked_over_http(ours, theirs)
    copy = replicas.store.copy()
    theirs.reached.cut()  # the post is still in the store
    assert (await browser.fetch("POST", said)).status == 202
    replicas.store.go_back(copy)
    theirs.reached.mend()
    theirs.again.finish()
    await trio.sleep(LEASE_S)
    assert theirs.again.answers == [{"says": "yes"}]


async def test_a_client_whose_arrival_the_store_has_lost_counts_as_attached(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    first = await theirs.dial(POSITIONS)
    stream = await first.begin(1, "again")
    await first.leave()
    with losing(replicas, posts.Attach):
        talker = await resumed(ours, stream)
        await wait_all_tasks_blocked()
    await trio.sleep(MAX_S + TAKEN_S)
    assert outcome_of(replicas) is Outcome.LIVE
    theirs.again.log("here")
    await talker.find(lambda m: m.get("method") == "notifications/message")
    assert said(talker.seen) == ["here"]


async def test_a_client_whose_end_the_store_has_lost_counts_as_gone(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    first = await theirs.dial(POSITIONS)
    stream = await first.begin(1, "again")
    await first.leave()
    talker = await resumed(ours, stream)
    await wait_all_tasks_blocked()
    with losing(replicas, posts.Left):
        await talker.leave()
        await wait_all_tasks_blocked()
    await trio.sleep(MAX_S + TAKEN_S)
    assert outcome_of(replicas) is Outcome.ABANDONED


async def test_a_client_that_the_owner_displaced_is_told_so_later(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial(POSITIONS)).begin(1, "again")
    talker = await resumed(ours, stream)
    await trio.sleep(LEASE_S)
    with losing(replicas, posts.Ended):
        newer = await resumed(theirs, stream)
        await wait_all_tasks_blocked()
    reply = (await talker.answer("resume"))["result"]
    assert reply["_meta"] == {"mcp-streams/ended": "superseded"}
    theirs.again.finish()
    await newer.answer(1)


async def test_a_call_goes_on_though_the_store_has_lost_how_far_its_client_is(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Without it, the limit on unsent messages would hold the tool up for ever."""
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial(POSITIONS)).begin(1, "again")
    talker = await resumed(ours, stream)
    await trio.sleep(LEASE_S)
    theirs.again.log(*map(str, range(3 * UNSENT_MAX)))
    with losing(replicas, posts.Moved):
        await wait_all_tasks_blocked()
    theirs.again.finish()
    await talker.answer(1)
    assert said(talker.seen) == [str(n) for n in range(3 * UNSENT_MAX)]


async def test_an_owner_knows_within_a_lease_how_far_a_client_elsewhere_is(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Published posts may be lost. An ack by a third replica may also come sooner."""
    ours, theirs, third = [await replicas.start() for _ in range(3)]
    stream = await (await theirs.dial(POSITIONS)).begin(1, "again")
    owned = theirs.running.engine.here(stream["streamId"])
    assert owned is not None
    with dropping(replicas, is_published):
        talker = await resumed(ours, stream)
        await wait_all_tasks_blocked()
        theirs.again.log("a")
        await talker.find(lambda m: said([m]) == ["a"])
        assert owned.reader is not None
        assert third.running.engine._replicas is not None
        third.running.engine._replicas.post(owned.id, posts.Acked(1, owned.reader.name))
        await wait_all_tasks_blocked()
        assert (owned.state.handed, owned.state.delivered) == (0, 0)
        await trio.sleep(2 * LEASE_S)
    assert (owned.state.handed, owned.state.delivered) == (1, 1)


@pytest.mark.parametrize("heirs", [1, 2])
async def test_a_client_that_was_silent_when_the_owner_died_is_attached_to_the_heir(
    replicas: Replicas, autojump_clock: MockClock, heirs: int
) -> None:
    ours, theirs = await replicas.two()
    for _ in range(1, heirs):
        await replicas.start()
    stream = await (await theirs.dial(POSITIONS)).begin(1, "again")
    talker = await ours.dial(POSITIONS, capacity=512)
    await talker.ask("resume", "stream/resume", **named(stream), after=0)
    theirs.again.log("more than fits" * 100)
    await trio.sleep(SILENCE_S + 10)
    followed = ours.running.engine.here(stream["streamId"])
    assert followed is not None
    assert followed.state.idle_since is not None
    theirs.kill()
    await trio.sleep(2 * TAKEN_S)
    await talker.find(lambda m: m.get("method") == "notifications/message")
    await trio.sleep(MAX_S + TAKEN_S)
    assert outcome_of(replicas) is Outcome.LIVE


@pytest.mark.parametrize("heirs", [1, 2])
async def test_a_client_has_its_own_progress_token_at_the_heir(
    replicas: Replicas, autojump_clock: MockClock, heirs: int
) -> None:
    ours, theirs = await replicas.two()
    others = [ours, *[await replicas.start() for _ in range(1, heirs)]]
    first, second = await theirs.dial(), await ours.dial()
    await idempotency.call(first, 1, name="again", _meta={"progressToken": "first"})
    await first.announced()
    await idempotency.call(second, 5, name="again", _meta={"progressToken": "second"})
    await wait_all_tasks_blocked()
    heir = await heir_of(theirs, others)
    heir.again.do(lambda call: call.progress(1, 2))
    told = await second.find(lambda m: m.get("method") == "notifications/progress")
    assert told["params"]["progressToken"] == "second"


async def test_a_cancel_that_the_store_has_lost_is_given_again(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """It matches no request at the replica that it came to."""
    ours, theirs = await replicas.two()
    browser = await theirs.browse(STREAMS)
    await browser.call(1, "again")
    await trio.sleep(LEASE_S)
    elsewhere = await ours.browse(STREAMS, browser.session)
    with losing(replicas, posts.Cancelled):
        assert (await elsewhere.tell("notifications/cancelled", requestId=1)).status == 202
        await wait_all_tasks_blocked()
    await trio.sleep(LEASE_S)
    assert outcome_of(replicas) is Outcome.CANCELLED
