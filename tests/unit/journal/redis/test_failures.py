"""A journal on a store that stops, restarts, loses its last writes or fails over."""

import math
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from anyio import ClosedResourceError
from coredis.connection import BaseConnection
from coredis.exceptions import BusyLoadingError, ClusterDownError, TryAgainError
from msgspec.structs import replace

from streams.clock import wall
from streams.engine.retry import patiently
from streams.errors import (
    Conflict,
    Fenced,
    Full,
    Gone,
    JournalError,
    JournalUnusable,
    StoreAway,
    StoreDown,
    Unavailable,
)
from streams.journal.contract import Journal
from streams.journal.records import (
    Ack,
    Append,
    Close,
    Create,
    Evict,
    Forget,
    Outcome,
    Record,
    Restore,
)
from streams.journal.redis import library, open_redis_journal
from streams.journal.redis.addresses import parse
from streams.journal.redis.link import CONNECT_PAUSE_S, Link, Servers, meaning
from streams.journal.redis.writer import JUMP, STREAMS_AT_ONCE
from streams.journal.sessions import SaveSession
from streams.limits import DAY_S
from streams.messages import Run
from tests.rigs.journals import (
    PLENTY,
    append,
    applied,
    as_one,
    last_append,
    lines,
    read_all,
    record,
    session,
    until_done,
)
from tests.rigs.redis_servers import KINDS, Server, cluster_url, running

PATIENCE_S = 60.0
QUICK_S = 0.3  # for a call of a store that does not answer
MANY = 300  # commands of one pipeline: to wait for each of them so long would take minutes


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with running(request.param, tmp_path / "server", "--appendonly", "yes") as server:
        yield server


@contextmanager
def with_replica(server: Server) -> Iterator[Server]:
    folder = server.folder.parent / "replica"
    with running(server.kind, folder, "--appendonly", "yes") as replica:
        replica.follow(server)
        yield replica


async def claimed_by(journal: Journal, owner: str) -> list[str]:
    streams: list[str] = []
    while piece := await journal.claim(owner):
        streams += [each.stream for each in piece]
    return streams


async def test_a_killed_store_that_comes_back_has_every_commit(server: Server) -> None:
    async with open_redis_journal(server.url, call_s=1.0) as journal:
        await applied(journal, Create(record()), append(1, 3))
        server.kill()
        with pytest.raises(Unavailable):
            await journal.commit([append(4, 4)])
        for _ in range(2):  # the second time it is too early for another attempt
            with pytest.raises(StoreDown):
                await journal.commit([append(4, 4)])
        assert await journal.read("s", 0, bytes_max=PLENTY) == [lines(1, 3)]  # from memory
        server.start()
        await until_done(lambda: applied(journal, append(4, 4)))
        assert await read_all(journal) == lines(1, 4).body
        assert await journal.renew()


@pytest.mark.parametrize(
    ("error", "is_down"),
    [
        (BusyLoadingError("LOADING the dataset is read"), True),
        (ClusterDownError("CLUSTERDOWN a slot has no node"), True),
        (TryAgainError("TRYAGAIN the slot moves"), False),
        (TimeoutError(), False),
    ],
)
def test_some_errors_say_that_the_store_is_down_for_all_replicas(
    error: Exception, is_down: bool
) -> None:
    meant = meaning(error, parse("redis://127.0.0.1"))
    assert isinstance(meant, StoreAway)
    assert isinstance(meant, StoreDown) == is_down


async def test_a_replica_that_runs_waits_for_a_store_that_has_lost_its_user(
    server: Server,
) -> None:
    """A restart of the store forgets what was set by ACL SETUSER alone."""
    rights = ("~*", "&*", "+@all")
    server.ask("ACL", "SETUSER", "mcp", "on", ">secret", *rights)
    url = server.url.replace("redis://", "redis://mcp:secret@")
    async with open_redis_journal(url, call_s=QUICK_S) as journal:
        await applied(journal, Create(record()))
        server.ask("ACL", "DELUSER", "mcp")  # which closes its connections
        for _ in range(3):
            with pytest.raises(Unavailable):
                await journal.commit([append(1, 1)])
            await trio.sleep(0.15)
        with pytest.raises(StoreAway, match="refuses the password"):
            await journal.find("s")
        with pytest.raises(JournalUnusable, match="refuses the password"):
            async with open_redis_journal(url):
                pass
        server.ask("ACL", "SETUSER", "mcp", "on", ">secret", *rights)
        await until_done(lambda: applied(journal, append(1, 1)))
        assert await read_all(journal) == lines(1, 1).body


async def test_a_store_that_does_not_answer_is_unavailable_in_time(server: Server) -> None:
    async with open_redis_journal(server.url, call_s=QUICK_S) as journal:
        await applied(journal, Create(record()), append(1, 3))
        many = [Create(record(f"many-{number}")) for number in range(MANY)]
        server.pause()
        try:
            with trio.fail_after(PATIENCE_S):
                for call in (
                    lambda: journal.commit([append(4, 4)]),
                    lambda: journal.commit(many),
                    journal.renew,
                    lambda: journal.find("s"),
                    lambda: journal.claim("nobody"),
                    lambda: journal.post("s", b"1"),
                ):
                    with pytest.raises(Unavailable):
                        await call()
        finally:
            server.resume()
        # The store may make the commit now that was given up.
        await until_done(lambda: applied(journal, append(4, 4), append(5, 5)))
        assert await read_all(journal) == lines(1, 5).body


async def test_a_commit_that_comes_late_changes_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Sequence[Any]] = []
    calls = Link.calls

    async def recording(link: Link, commands: Sequence[Sequence[Any]]) -> list[Any]:
        sent.extend(commands)
        return await calls(link, commands)

    monkeypatch.setattr(Link, "calls", recording)
    async with open_redis_journal(server.url) as journal:
        sent.clear()
        await applied(journal, Create(record()))
        created = next(each for each in sent if each[1] == library.function("commit"))
        await applied(journal, Forget("s", 1))
        # As from the buffers of a connection that was given up.
        assert await journal._reader.call(*created) == [b"late"]
        assert await journal.find("s") is None
        await applied(journal, Create(record()), append(1, 2))
        assert await read_all(journal) == lines(1, 2).body


async def test_a_cancelled_commit_leaves_no_wrong_memory(server: Server) -> None:
    async with open_redis_journal(server.url) as journal:
        await applied(journal, Create(record()))
        for n in range(1, 30):
            with trio.move_on_after(0.0005 * (n % 5)):
                await journal.commit([append(n, n)])
            await applied(journal, append(n, n))
        assert await read_all(journal) == lines(1, 29).body


async def test_what_the_store_has_lost_is_applied_again(server: Server) -> None:
    with with_replica(server) as replica:
        async with open_redis_journal(server.url, call_s=1.0) as journal:
            await applied(journal, Create(record("a")), Create(record()), append(1, 3))
            await _caught_up(server, replica)
            replica.promote()  # which hears nothing of what comes
            await applied(journal, append(4, 6), Ack("s", 1, 2), Forget("a", 1))
            await applied(journal, Create(record("b")), append(1, 2, stream="b"))
            _fail_over(server, replica)
            await until_done(lambda: applied(journal, append(7, 7)))
            assert await read_all(journal, 2) == lines(3, 7).body
            assert await journal.find("a") is None
            assert as_one(await journal.read("b", 0, bytes_max=PLENTY)) == lines(1, 2)
            found = await journal.find("s")
            assert found
            assert (found.last, found.acked, found.lost) == (7, 2, None)


async def test_a_loss_is_noticed_by_a_renewal(server: Server) -> None:
    with with_replica(server) as replica:
        async with open_redis_journal(server.url, call_s=1.0) as journal:
            await applied(journal, Create(record()), append(1, 3))
            await _caught_up(server, replica)
            replica.promote()  # which hears nothing of what comes
            await applied(journal, append(4, 6))
            _fail_over(server, replica)
            await until_done(journal.renew)
            assert await read_all(journal) == lines(1, 6).body


async def test_an_emptied_store_gets_what_it_had_for_some_seconds(server: Server) -> None:
    async with open_redis_journal(server.url) as journal:
        await applied(journal, Create(record(), (b"n" * 16,)), append(1, 3))
        await journal.follow("s")
        server.ask("FLUSHALL")
        await applied(journal, append(4, 4))
        assert await read_all(journal) == lines(1, 4).body
        assert await journal.named(b"n" * 16) == "s"
        assert journal.replica in (await journal.renew() or {})


async def test_what_is_older_than_the_memory_is_restored_as_lost(server: Server) -> None:
    async with open_redis_journal(server.url) as journal:
        await applied(journal, Create(record()), append(1, 3))
        known = await journal.find("s")
        assert known
        journal._writer._recent.drop_old(math.inf)
        server.ask("FLUSHALL")
        [answer] = await journal.commit([append(4, 4)])
        assert isinstance(answer, Gone)
        await applied(journal, Restore(1, known), append(4, 4))
        found = await journal.find("s")
        assert found
        assert (found.last, found.lost) == (4, (1, 3))
        assert as_one(await journal.read("s", 0, bytes_max=PLENTY)) == lines(4, 4)


async def test_lines_that_were_partly_lost_leave_a_gap(server: Server) -> None:
    with with_replica(server) as replica:
        async with open_redis_journal(server.url, call_s=1.0) as journal:
            await applied(journal, Create(record()), append(1, 3))
            await _caught_up(server, replica)
            replica.promote()  # which hears nothing of what comes
            await applied(journal, append(4, 6))
            known = await journal.find("s")
            assert known
            journal._writer._recent.drop_old(math.inf)
            _fail_over(server, replica)
            answers: list[JournalError | None] = []

            async def late() -> None:
                answers[:] = await journal.commit([append(7, 7)])

            await until_done(late)
            assert isinstance(answers[0], Conflict)
            await applied(journal, Restore(1, known), append(7, 7))
            assert as_one(await journal.read("s", 0, bytes_max=PLENTY)) == lines(1, 3)
            assert as_one(await journal.read("s", 3, bytes_max=PLENTY)) == lines(7, 7)


async def test_a_claim_after_a_failover_leaves_numbers_out(server: Server) -> None:
    with with_replica(server) as replica:
        async with open_redis_journal(server.url, call_s=QUICK_S) as dead:
            await applied(dead, Create(record()), Create(record("t")), append(1, 3))
            await applied(dead, append(1, 2, stream="t", outcome=Outcome.COMPLETED, ended_at=1.0))
            await dead.renew()
            await _caught_up(server, replica)
            replica.promote()  # which hears nothing of what comes
            await applied(dead, append(4, 6))
            _fail_over(server, replica)
            url = replica.url
            async with open_redis_journal(url, call_s=1.0) as heir:
                claimed = {each.stream: each for each in await heir.claim(dead.replica)}
                live, ended = claimed["s"], await heir.find("t")
                assert ended is not None
                assert (live.last, live.lost) == (3 + JUMP, (4, 3 + JUMP))
                assert (ended.last, ended.lost) == (2, None)
                last = live.last
                await applied(heir, append(last + 1, last + 1, fence=live.fence))
                assert as_one(await heir.read("s", 0, bytes_max=PLENTY)) == lines(1, 3)
                after = await heir.read("s", last, bytes_max=PLENTY)
                assert as_one(after) == lines(last + 1, last + 1)


async def test_a_claim_that_the_store_has_lost_is_made_again(server: Server) -> None:
    with with_replica(server) as replica:
        async with open_redis_journal(server.url, call_s=1.0) as dead:
            await applied(dead, Create(record()), append(1, 3))
            await dead.renew()
            await _caught_up(server, replica)
            async with open_redis_journal(server.url, call_s=1.0) as heir:
                await _caught_up(server, replica)
                replica.promote()  # which hears nothing of what comes
                [claimed] = await heir.claim(dead.replica)
                await applied(heir, append(4, 6, fence=claimed.fence))
                _fail_over(server, replica)
                await until_done(lambda: applied(heir, append(7, 7, fence=claimed.fence)))
                found = await heir.find("s")
                assert found
                assert (found.owner, found.fence, found.last) == (heir.replica, 2, 7)
                assert found.lost is None
                assert await read_all(heir) == lines(1, 7).body
                await until_done(heir.renew)
                [answer] = await dead.commit([append(4, 4)])
                assert isinstance(answer, Fenced)


async def test_a_claim_leaves_no_number_out_where_nothing_was_lost(server: Server) -> None:
    async with (
        open_redis_journal(server.url) as dead,
        open_redis_journal(server.url) as heir,
    ):
        await applied(dead, Create(record()), append(1, 3))
        await dead.renew()
        server.kill()  # with appendfsync always
        server.start()
        await until_done(heir.renew)
        claimed: list[object] = []

        async def claim() -> None:
            claimed.extend(await heir.claim(dead.replica))

        await until_done(claim)
        assert [(each.last, each.lost) for each in claimed] == [(3, None)]  # type: ignore[attr-defined]


async def test_an_owner_that_has_seen_the_new_store_vouches_for_its_streams(
    tmp_path: Path,
) -> None:
    settings = ("--appendonly", "yes", "--appendfsync", "everysec")
    with running("redis", tmp_path, *settings) as server:
        async with (
            open_redis_journal(server.url) as one,
            open_redis_journal(server.url) as two,
        ):
            await applied(one, Create(record()), append(1, 3))
            await one.renew()
            server.kill()
            server.start()
            await until_done(one.renew)
            await until_done(lambda: applied(one, append(4, 4)))
            await until_done(one.renew)
            await until_done(two.renew)
            [claimed] = await two.claim(one.replica)
            assert (claimed.last, claimed.lost) == (4, None)


async def test_a_replica_whose_streams_were_claimed_is_fenced_and_goes_on(server: Server) -> None:
    async with (
        open_redis_journal(server.url) as one,
        open_redis_journal(server.url) as two,
    ):
        await applied(one, Create(record()), append(1, 2))
        first = one.replica
        assert await claimed_by(two, first) == ["s"]
        assert [type(a) for a in await one.commit([append(3, 3)])] == [Fenced]
        assert await one.renew() is None
        assert one.replica != first
        await applied(one, Create(record("t")))
        await two.follow("t")
        await applied(one, append(1, 1, stream="t"))
        assert "t" in (await two.news()).changed
        assert await two.post("t", b"hello")
        assert [post.body for post in (await one.news()).posts] == [b"hello"]


async def test_two_claimants_get_each_stream_once(server: Server) -> None:
    async with (
        open_redis_journal(server.url) as dead,
        open_redis_journal(server.url) as one,
        open_redis_journal(server.url) as two,
    ):
        names = [f"s{n:03}" for n in range(350)]
        await applied(dead, *(Create(record(name, number=n + 1)) for n, name in enumerate(names)))
        got: list[str] = []

        async def claim(journal: Journal) -> None:
            got.extend(await claimed_by(journal, dead.replica))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(claim, one)
            nursery.start_soon(claim, two)
        assert sorted(got) == names


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "not kept"])
async def test_a_stream_that_its_owner_does_not_know_any_more_uses_no_number_again(
    server: Server, *, is_kept: bool
) -> None:
    """Its owner has evicted it, which the store has lost, and so have the last lines been."""
    with with_replica(server) as replica:
        async with open_redis_journal(server.url, call_s=1.0) as journal:
            await applied(journal, Create(record()), append(1, 3))
            await _caught_up(server, replica)
            replica.promote()  # which hears nothing of what comes
            end = append(4, 6, outcome=Outcome.COMPLETED, ended_at=1.0)
            await applied(journal, end, Evict("s", 1, 5.0))
            if not is_kept:
                journal._writer._recent.drop_old(math.inf)
            _fail_over(server, replica)
            taken: list[Record | None] = []

            async def take() -> None:
                taken.append(await journal.take("s"))

            await until_done(take)
            assert taken[0]
            if is_kept:
                assert (taken[0].last, taken[0].outcome) == (6, Outcome.COMPLETED)
            else:
                assert (taken[0].last, taken[0].lost) == (3 + JUMP, (4, 3 + JUMP))
                [again] = [each for each in [await journal.take("s")] if each]
                assert again == taken[0], "once is enough"
                await applied(journal, append(4 + JUMP, 4 + JUMP, fence=taken[0].fence))


async def test_a_subscription_without_an_answer_ends_no_process(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the packets to the store get lost for a while."""
    monkeypatch.setattr("streams.journal.redis.news.PING_S", 0.02)
    async with open_redis_journal(server.url, call_s=QUICK_S) as journal:
        server.pause()
        try:
            with trio.fail_after(PATIENCE_S):
                connection = journal.listener._connection
                assert connection is not None
                while connection.usable:
                    await trio.sleep(0.01)
        finally:
            server.resume()
        with trio.fail_after(PATIENCE_S):
            assert (await journal.news()).is_all


async def test_two_errors_at_once_are_one_loss_of_the_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = trio.Event()

    async def fail(error: Exception) -> None:
        await lost.wait()
        raise error

    async with open_redis_journal(server.url) as journal, trio.open_nursery() as nursery:
        listener = journal.listener
        monkeypatch.setattr(listener, "_hear", lambda _: fail(StoreAway("in `_begin`")))
        monkeypatch.setattr(listener, "_keep_alive", lambda _: fail(ConnectionResetError()))
        nursery.start_soon(_set_when_blocked, lost)
        with pytest.raises(Unavailable):
            await listener._listen()
        monkeypatch.undo()


async def _set_when_blocked(event: trio.Event) -> None:
    await trio.testing.wait_all_tasks_blocked(0.1)
    event.set()


async def test_a_store_that_is_away_gets_few_attempts_to_connect(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many calls wait for it, and however often they are made again."""
    attempts = 0
    connect = Servers.connect

    async def counted(servers: Servers) -> Any:
        nonlocal attempts
        attempts += 1
        return await connect(servers)

    async with open_redis_journal(server.url) as journal:
        server.kill()
        monkeypatch.setattr(Servers, "connect", counted)
        calls = 0
        began_at = trio.current_time()

        async def call() -> None:
            nonlocal calls
            while trio.current_time() < began_at + 0.5:
                with pytest.raises(StoreAway):
                    await journal.find("s")
                calls += 1
                await trio.sleep(0.001)

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(call)
        took_s = trio.current_time() - began_at
        # Three links may try at the same moment.
        assert attempts <= 3 * (1 + took_s / CONNECT_PAUSE_S) < calls
        server.start()
        await until_done(lambda: journal.find("s"))


async def test_an_attempt_to_connect_that_is_cancelled_leaves_no_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has taken the connection, and does not say whether it has the keys."""
    async with trio.open_nursery() as nursery:
        servers = Servers(parse(cluster_url([server])), nursery, PATIENCE_S)
        connect = servers._connect_to

        async def connect_and_stop(*where: Any, **other: Any) -> BaseConnection:
            connection = await connect(*where, **other)
            server.pause()
            return connection

        monkeypatch.setattr(servers, "_connect_to", connect_and_stop)
        with trio.move_on_after(QUICK_S) as scope:
            await Link(servers).connection()
        server.resume()
        assert scope.cancelled_caught
        with trio.fail_after(5):
            while b"connected_clients:1\r" not in server.ask("INFO", "clients"):
                await trio.sleep(0.05)
        nursery.cancel_scope.cancel()


async def test_news_that_were_missed_are_all(server: Server) -> None:
    async with (
        open_redis_journal(server.url, call_s=1.0) as one,
        open_redis_journal(server.url, call_s=1.0) as two,
    ):
        await applied(one, Create(record()))
        await two.follow("s")
        server.ask("CLIENT", "KILL", "TYPE", "PUBSUB")
        with trio.fail_after(PATIENCE_S):
            assert (await two.news()).is_all
            await until_done(lambda: applied(one, append(1, 1)))
            while "s" not in (await two.news()).changed:
                pass


async def test_a_full_store_takes_what_frees_memory(tmp_path: Path) -> None:
    with running("redis", tmp_path, "--maxmemory", "16mb") as server:
        async with open_redis_journal(server.url) as journal:
            body = b"x" * 200_000 + b"\n"
            await applied(journal, Create(record()), Create(record("t")))
            n = await _fill(journal, body)
            with trio.fail_after(PATIENCE_S):
                while journal.shortage is None or not journal.shortage.is_severe:
                    await trio.sleep(0.01)
            assert journal.shortage.limit == 16 * 1024 * 1024
            assert await journal.renew()
            await applied(journal, Ack("s", 1, n - 1), Close("t", 1, Outcome.CANCELLED, 1.0))
            await until_done(lambda: applied(journal, Append("s", 1, Run(n, 1, body), 0, 0)))
            with trio.fail_after(PATIENCE_S):
                while journal.shortage is not None:
                    await trio.sleep(0.01)


async def test_each_commit_shows_a_shortage_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fast call fills the reserve between two looks at the memory of the store."""
    monkeypatch.setattr("streams.journal.redis.journal.MEMORY_S", math.inf)
    with running("redis", tmp_path, "--maxmemory", "32mb") as server:
        async with open_redis_journal(server.url) as journal:
            await applied(journal, Create(record()))
            body = b"x" * 999_999 + b"\n"
            n = 0
            while journal.shortage is None:
                n += 1
                await applied(journal, Append("s", 1, Run(n, 1, body), 0, 0))
            assert n > 15


async def test_expired_sessions_that_the_store_still_has_do_not_count(server: Server) -> None:
    """They are dropped when the next one is saved, which a full house would refuse."""
    async with open_redis_journal(server.url, session_idle_s=-2 * DAY_S) as journal:
        await applied(journal, SaveSession(session("k")))
        assert await journal.count_sessions() == 0
    async with open_redis_journal(server.url) as journal:
        await applied(journal, SaveSession(session("l")))
        assert await journal.count_sessions() == 1


async def test_limits_count_what_is_kept(server: Server) -> None:
    body = b"x" * 9_999 + b"\n"
    async with (
        open_redis_journal(server.url, bytes_max=100_000, anonymous_bytes_max=100_000) as journal,
        open_redis_journal(server.url, bytes_max=100_000) as heir,
    ):
        anonymous = replace(record("a"), principal="session(x)")
        await applied(journal, Create(record()), Create(anonymous))
        for n in range(1, 10):
            await applied(journal, Append("s", 1, Run(n, 1, body), 0, 0))
        assert journal.shortage
        assert journal.anonymous_shortage is None
        assert journal.shortage.limit == 100_000
        [_, claimed] = await heir.claim(journal.replica)
        await applied(heir, Ack("s", claimed.fence, 9), Forget("s", claimed.fence))
        assert heir.shortage is None
        for n in range(1, 10):
            await applied(heir, Append("a", 2, Run(n, 1, body), 0, 0))
        await journal.renew()
        await applied(journal, Create(record("z")))
        assert journal.anonymous_shortage
        await applied(heir, Forget("a", 2))
        await applied(journal, Forget("z", 1))
        assert await heir.commit([]) == []
        assert (journal._writer.bytes, journal._writer.anonymous_bytes) == (0, 0)


async def test_calls_that_run_are_claimed_before_all_that_have_ended(server: Server) -> None:
    """A replica may have thousands of ended calls, which need no owner."""
    async with (
        open_redis_journal(server.url, call_s=PATIENCE_S) as dead,
        open_redis_journal(server.url, call_s=PATIENCE_S) as heir,
    ):
        names = [f"{number:03}" for number in range(STREAMS_AT_ONCE + 20)]
        await applied(dead, *(Create(record(name, number=1)) for name in names))
        await applied(dead, *(last_append(1, 1, stream=name) for name in names))
        await applied(dead, Create(record("live", number=2)), append(1, 1, stream="live"))
        assert [each.stream for each in await heir.claim(dead.replica)] == ["live"]
        assert await claimed_by(heir, dead.replica) == []
        ended = await heir.find(names[0])
        assert ended is not None
        assert ended.owner == ""
        assert ended.due_at is not None
        assert ended.due_at > wall()
        assert as_one(await heir.read(names[0], 0, bytes_max=PLENTY)) == lines(1, 1)
        taken = await heir.take(names[0])
        assert taken is not None
        assert taken.owner == heir.replica


async def test_a_release_leaves_calls_that_have_ended_without_an_owner(server: Server) -> None:
    async with (
        open_redis_journal(server.url, call_s=PATIENCE_S) as leaving,
        open_redis_journal(server.url, call_s=PATIENCE_S) as heir,
    ):
        names = [f"{number:03}" for number in range(STREAMS_AT_ONCE + 20)]
        await applied(leaving, *(Create(record(name, number=1)) for name in names))
        await applied(leaving, *(last_append(1, 1, stream=name) for name in names))
        await applied(leaving, Create(record("live", number=2)))
        await leaving.release()
        assert [each.stream for each in await heir.claim()] == ["live"]
        assert await heir.claim() == []


async def test_a_connection_that_goes_dead_ends_no_replica(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a partition in which packets are dropped: the news come by the next connection."""
    monkeypatch.setattr("streams.journal.redis.news.PING_S", 0.05)
    async with open_redis_journal(server.url, call_s=QUICK_S) as journal:
        await applied(journal, Create(record()))
        await journal.follow("s")
        os.kill(server.pid, signal.SIGSTOP)
        await trio.sleep(4 * QUICK_S)
        os.kill(server.pid, signal.SIGCONT)
        with trio.fail_after(PATIENCE_S):
            while not (await patiently(journal.news)).is_all:
                pass


async def test_a_connection_that_is_dropped_while_it_is_used_ends_no_replica(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """coredis then raises an error of anyio, in whichever task uses the connection next."""
    monkeypatch.setattr("streams.journal.redis.news.PING_S", 0.0)
    async with open_redis_journal(server.url, call_s=PATIENCE_S) as journal:
        await applied(journal, Create(record()))
        real, failures = BaseConnection.create_request, iter([ClosedResourceError()] * 5)

        def create_request(connection: BaseConnection, *command: Any, **how: Any) -> Any:
            if (failure := next(failures, None)) is not None:
                connection.invalidate()
                raise failure
            return real(connection, *command, **how)

        monkeypatch.setattr(BaseConnection, "create_request", create_request)
        with trio.fail_after(PATIENCE_S):
            while not (await patiently(journal.news)).is_all:
                pass
        await until_done(lambda: applied(journal, append(1, 1)))
        assert await read_all(journal) == lines(1, 1).body


async def test_a_post_that_is_not_kept_waits_in_the_store_only_where_nobody_listens(
    server: Server,
) -> None:
    async with open_redis_journal(server.url) as one, open_redis_journal(server.url) as two:
        await applied(one, Create(record()))
        inbox = f"{{mcp-streams}}:in:{one.replica}"
        for is_listening in (True, False):
            if not is_listening:
                server.ask("CLIENT", "KILL", "TYPE", "pubsub")
            assert await two.post("s", b"hello", is_kept=False)
            assert server.ask("XLEN", inbox) == (b":0\r\n" if is_listening else b":1\r\n")
            with trio.fail_after(PATIENCE_S):
                while not (posts := (await patiently(one.news)).posts):
                    pass
            assert [each.body for each in posts] == [b"hello"]


async def test_functions_that_are_gone_are_loaded_again(server: Server) -> None:
    async with open_redis_journal(server.url) as journal:
        await applied(journal, Create(record()))
        server.ask("FUNCTION", "FLUSH")
        await applied(journal, append(1, 3))
        server.ask("FUNCTION", "FLUSH")
        assert await read_all(journal) == lines(1, 3).body


async def test_a_server_that_becomes_a_replica_is_unavailable(server: Server) -> None:
    with with_replica(server) as replica:
        async with open_redis_journal(server.url, call_s=1.0) as journal:
            await applied(journal, Create(record()))
            await _caught_up(server, replica)
            replica.promote()
            server.ask("REPLICAOF", "127.0.0.1", str(replica.port))
            with pytest.raises((Unavailable, JournalUnusable)) as caught:
                await journal.commit([append(1, 1)])
            assert isinstance(caught.value, Unavailable)


async def _fill(journal: Journal, body: bytes) -> int:
    """Append until the store is full. Returns the seq that found no room."""
    for n in range(1, 200):
        try:
            await applied(journal, Append("s", 1, Run(n, 1, body), 0, 0))
        except Full:
            return n
    raise AssertionError("the store takes everything")


async def _caught_up(server: Server, replica: Server) -> None:
    """Wait until a replica has every write so far."""
    with trio.fail_after(PATIENCE_S):
        while _offset(server) != _offset(replica):
            await trio.sleep(0.01)


def _offset(server: Server) -> bytes:
    answer = server.ask("INFO", "replication")
    [line] = [each for each in answer.splitlines() if each.startswith(b"master_repl_offset")]
    return line


def _fail_over(server: Server, replica: Server) -> None:
    """The replica, which is behind, takes the place of the primary, on its port."""
    server.kill()
    replica.take_place_of(server)
