"""Calls, claims, turns and losses at the same time, in a journal on a store."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec.structs import replace

from streams.errors import Fenced, StoreAway, Unavailable
from streams.journal.records import Create, Forget, Restore
from streams.journal.redis import open_redis_journal, replay
from streams.journal.redis.journal import TURNS_AT_ONCE
from streams.journal.redis.writer import JUMP
from tests.rigs.journals import PLENTY, append, applied, as_one, lines, read_all, record, until_done
from tests.rigs.redis_servers import Server, running
from tests.unit.journal.redis.test_failures import (
    PATIENCE_S,
    QUICK_S,
    _caught_up,
    _fail_over,
    with_replica,
)

PREFIX = "{mcp-streams}:"
NO = b":0\r\n"
YES = b":1\r\n"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running("redis", tmp_path / "server", "--appendonly", "yes") as server:
        yield server


async def test_a_replica_vouches_for_nothing_while_lost_commits_are_not_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an heir would use numbers again that clients have."""
    with with_replica(server) as replica:
        async with open_redis_journal(server.url, call_s=1.0) as dead:
            await applied(dead, Create(record()), append(1, 3))
            await dead.renew()
            await _caught_up(server, replica)
            replica.promote()  # which hears nothing of what comes
            await applied(dead, append(4, 6))
            _fail_over(server, replica)
            writer = dead._writer
            look_up = writer._look_up

            async def stands_still(streams: Any, **how: Any) -> Any:
                if writer._replay_since is not None:
                    raise StoreAway("it stands still")
                return await look_up(streams, **how)

            monkeypatch.setattr(writer, "_look_up", stands_still)
            with trio.fail_after(PATIENCE_S):
                while writer._replay_since is None:
                    with pytest.raises(Unavailable):
                        await dead.commit([append(7, 7)])
                    await trio.sleep(0.05)
            with pytest.raises(StoreAway, match="it stands still"):
                await dead.renew()
            async with open_redis_journal(replica.url, call_s=1.0) as heir:
                [claimed] = await heir.claim(dead.replica)
                assert (claimed.last, claimed.lost) == (3 + JUMP, (4, 3 + JUMP))
            monkeypatch.undo()


async def test_an_emptied_store_makes_no_replica_seem_gone(server: Server) -> None:
    async with open_redis_journal(server.url) as one, open_redis_journal(server.url) as two:
        await two.renew()
        before = await one.renew()
        assert before is not None
        server.ask("FLUSHALL")
        after = await one.renew()
        assert after is not None
        assert after.keys() == {one.replica, two.replica}
        assert after[two.replica] == before[two.replica], "as if it stood still"
        assert await two.renew()
        again = await one.renew()
        assert again is not None
        assert again.keys() == {one.replica, two.replica}
        await two.aclose()
        assert (await one.renew() or {}).keys() == {one.replica}


async def test_a_lost_count_is_shown_for_a_while_only(server: Server) -> None:
    async with (
        open_redis_journal(server.url, lease_s=0.1) as one,
        open_redis_journal(server.url) as two,
    ):
        await one.renew()
        server.ask("HDEL", f"{PREFIX}replicas", one.replica, two.replica)
        await one.renew()
        with trio.fail_after(PATIENCE_S):
            while (await one.renew() or {}).keys() != {one.replica}:
                await trio.sleep(0.05)


async def test_the_memory_of_commits_does_not_age_while_the_store_is_away(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "KEPT_S", 0.05)
    with with_replica(server) as replica:
        async with open_redis_journal(server.url, call_s=QUICK_S) as journal:
            await applied(journal, Create(record()), append(1, 3))
            await _caught_up(server, replica)
            replica.promote()  # which hears nothing of what comes
            await applied(journal, append(4, 6))
            server.kill()
            until = trio.current_time() + 5 * replay.KEPT_S
            while trio.current_time() < until:
                with pytest.raises(Unavailable):
                    await journal.renew()
                await trio.sleep(0.01)
            replica.take_place_of(server)
            await until_done(lambda: applied(journal, append(7, 7)))
            assert await read_all(journal) == lines(1, 7).body


async def test_an_answer_for_the_former_name_ends_no_new_one(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_redis_journal(server.url) as one, open_redis_journal(server.url) as two:
        await applied(one, Create(record()))
        await two.claim(one.replica)
        calls, is_asked, may_hear = one._writer.link.calls, trio.Event(), trio.Event()

        async def slow(commands: Sequence[Any]) -> list[Any]:
            answers = await calls(commands)
            if not is_asked.is_set():
                is_asked.set()
                await may_hear.wait()
            return answers

        monkeypatch.setattr(one._writer.link, "calls", slow)
        answers: list[Any] = []

        async def commit() -> None:
            answers[:] = await one.commit([append(1, 1)])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(commit)
            await is_asked.wait()
            assert await one.renew() is None
            name = one.replica
            may_hear.set()
        assert [type(each) for each in answers] == [Fenced]
        assert one.replica == name
        assert await one.renew()


async def test_a_forgotten_stream_leaves_no_followers(server: Server) -> None:
    async with open_redis_journal(server.url) as one, open_redis_journal(server.url) as two:
        await applied(one, Create(record()))
        await two.follow("s")
        assert server.ask("EXISTS", f"{PREFIX}f:s") == YES
        await applied(one, Forget("s", 1))
        with trio.fail_after(PATIENCE_S):
            assert "s" in (await two.news()).changed
        assert server.ask("EXISTS", f"{PREFIX}f:s") == NO


async def test_renewals_begin_no_turn_again_that_has_ended(server: Server) -> None:
    async with open_redis_journal(server.url, lease_s=30.0) as one:
        async with one.turn(b"held"):
            for n in range(2 * TURNS_AT_ONCE):
                one._turns[b"ended%d" % n] = "holder"
            assert server.ask("PEXPIRE", f"{PREFIX}t:held", "1000") == YES
            await one.renew()
            assert server.ask("EXISTS", f"{PREFIX}t:ended0") == NO
            # It lasts for longer than the lease: first the streams of its replica are claimed.
            assert int(server.ask("PTTL", f"{PREFIX}t:held")[1:]) > 30_000
            one._turns.clear()
        assert server.ask("EXISTS", f"{PREFIX}t:held") == NO


async def test_a_turn_passes_when_the_streams_of_its_replica_are_claimed(server: Server) -> None:
    """A client waits for it, whose call had just begun when the replica died."""
    async with (
        open_redis_journal(server.url, lease_s=300.0) as one,
        open_redis_journal(server.url, lease_s=300.0) as two,
    ):
        held = one.turn(b"held")
        await held.__aenter__()
        assert await two.claim(one.replica) == []
        with trio.fail_after(PATIENCE_S):  # far less than the lease
            async with two.turn(b"held"):
                await held.__aexit__(None, None, None)
                assert server.ask("EXISTS", f"{PREFIX}t:held") == YES, "it is the other one's"


async def test_replicas_that_are_gone_are_not_among_those_that_live(server: Server) -> None:
    async with open_redis_journal(server.url) as one, open_redis_journal(server.url) as two:
        name = one.replica
        await two.claim(name)
        for of in ("replicas", "commits", "schemas"):
            assert server.ask("HEXISTS", f"{PREFIX}{of}", name) == NO
        assert await one.renew() is None
        assert (await two.renew() or {}).keys() == {one.replica, two.replica}


async def test_members_of_an_index_without_their_streams_are_removed(server: Server) -> None:
    async with open_redis_journal(server.url) as one, open_redis_journal(server.url) as two:
        await applied(one, Create(record()))
        for owner in ("nobody", one.replica):
            server.ask("ZADD", f"{PREFIX}o:{owner}", "0", "r12345678lost")
        with trio.fail_after(PATIENCE_S):
            assert await two.claim("nobody") == []
            await one.release()
        for owner in ("nobody", one.replica):
            assert server.ask("EXISTS", f"{PREFIX}o:{owner}") == NO
        assert [each.stream for each in await two.claim()] == ["s"]


async def test_lines_and_a_gap_behind_them_are_one_commit(server: Server) -> None:
    async with open_redis_journal(server.url) as journal:
        await applied(journal, Create(record()), append(1, 3))
        known = await journal.find("s")
        assert known is not None
        further = replace(known, last=JUMP)
        await applied(journal, append(4, 6), Restore(1, further), append(JUMP + 1, JUMP + 2))
        found = await journal.find("s")
        assert found is not None
        assert (found.last, found.lost) == (JUMP + 2, (7, JUMP))
        assert as_one(await journal.read("s", 0, bytes_max=PLENTY)) == lines(1, 6)
        after = as_one(await journal.read("s", 6, bytes_max=PLENTY))
        assert after == lines(JUMP + 1, JUMP + 2)
