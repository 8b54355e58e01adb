"""Reads of many lines: each stored run once, ahead of a reader that is far behind."""

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from streams.errors import Missing, Unavailable
from streams.journal.contract import STORED_BYTES_MAX, Journal
from streams.journal.records import Ack, Append, Create, Forget
from streams.journal.redis import open_redis_journal
from streams.journal.redis.journal import RedisJournal
from streams.journal.redis.lines import AHEAD_MAX, AHEAD_S, FIRST_RUNS, READS_MAX, RUNS_AT_FIRST
from streams.messages import Run
from tests.rigs.journals import applied, record
from tests.rigs.redis_servers import Server, running

KIB = 1024
PATIENCE_S = 60.0
QUICK_S = 0.3  # for a call of a store that does not answer
SHARE = 256 * KIB  # of one read, as for a connection with one stream
OVERHEAD = 64 * KIB  # of everything else that the store sends in a test


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running("redis", tmp_path / "server") as server:
        yield server


@asynccontextmanager
async def of_store(server: Server, call_s: float = 5.0) -> AsyncIterator[RedisJournal]:
    """A journal that reads every line from the store."""
    async with open_redis_journal(server.url, call_s=call_s, cache_bytes_max=0) as journal:
        yield journal


def run(seq: int, size: int, count: int = 1) -> Run:
    """Lines of `size` bytes each, which tell their numbers."""
    body = b"".join((b'{"n":%d}' % n).ljust(size - 1) + b"\n" for n in range(seq, seq + count))
    return Run(seq, count, body)


def changes(runs: Sequence[Run], stream: str = "s") -> list[Append]:
    return [Append(stream, 1, each, 0, 0) for each in runs]


async def filled(journal: Journal, runs: Sequence[Run], stream: str = "s") -> None:
    """Store each run as one."""
    for change in changes(runs, stream):
        await applied(journal, change)


async def replay(journal: Journal, last: int, after: int = 0, stream: str = "s") -> bytes:
    body = b""
    while after < last:
        found = await journal.read(stream, after, bytes_max=SHARE)
        assert found
        assert found[0].seq == after + 1
        assert sum(len(each.body) for each in found) <= SHARE
        body += b"".join(each.body for each in found)
        after = found[-1].last
    return body


def sent_bytes(server: Server) -> int:
    told = server.ask("INFO", "stats").decode()
    return int(told.partition("total_net_output_bytes:")[2].split()[0])


def is_whole(body: bytes, runs: Sequence[Run]) -> bool:
    return body == b"".join(each.body for each in runs)


@pytest.mark.parametrize("size", [100, 30 * KIB, 100 * KIB, STORED_BYTES_MAX])
async def test_a_long_replay_takes_each_run_from_the_store_about_once(
    server: Server, size: int
) -> None:
    runs = [run(seq, size) for seq in range(1, 1 + max(40, 2000 * 100 // size))]
    async with of_store(server) as journal:
        await applied(journal, Create(record()))
        await filled(journal, runs)
        before = sent_bytes(server)
        assert is_whole(await replay(journal, len(runs)), runs)
        whole = sum(len(each.body) for each in runs)
        # An entry has some bytes of its own, and the first read does not know how long runs are.
        own = 100 * len(runs) + FIRST_RUNS * size + OVERHEAD
        assert sent_bytes(server) - before <= whole + own


async def test_long_runs_behind_short_ones_are_not_all_read_at_once(server: Server) -> None:
    few = [run(seq, 100) for seq in range(1, 11)]
    many = [run(seq, STORED_BYTES_MAX) for seq in range(11, 11 + 4 * RUNS_AT_FIRST)]
    async with of_store(server) as journal:
        await applied(journal, Create(record()))
        await filled(journal, few)
        assert is_whole(await replay(journal, len(few)), few)
        await filled(journal, many)
        before = sent_bytes(server)
        [found] = await journal.read("s", len(few), bytes_max=SHARE)
        assert found == many[0]
        most = RUNS_AT_FIRST * STORED_BYTES_MAX + 2 * SHARE
        assert sent_bytes(server) - before <= most + OVERHEAD


async def test_lines_that_are_committed_behind_those_read_ahead_are_not_missed(
    server: Server,
) -> None:
    runs = [run(seq, STORED_BYTES_MAX) for seq in range(1, 8)]
    async with of_store(server) as journal:
        await applied(journal, Create(record()))
        await filled(journal, runs[:3])
        body = await replay(journal, 3)  # what follows was asked for, and there was nothing
        await filled(journal, runs[3:6])
        body += await replay(journal, 6, after=3)
        await filled(journal, runs[6:])
        assert is_whole(body + await replay(journal, 7, after=6), runs)


async def test_readers_at_several_positions_get_what_follows_theirs(server: Server) -> None:
    runs = [run(1 + 1000 * n, 200, 1000) for n in range(6)]
    whole = b"".join(each.body for each in runs)
    async with of_store(server) as journal:
        await applied(journal, Create(record()))
        await filled(journal, runs)
        async with trio.open_nursery() as nursery:
            for after in (0, 1, 999, 1000, 2500, 5999):

                async def follow(after: int) -> None:
                    assert await replay(journal, 6000, after) == whole[200 * after :]

                nursery.start_soon(follow, after)
        # One that has come further, and then begins anew.
        await journal.read("s", 0, bytes_max=SHARE)
        await applied(journal, Ack("s", 1, 1500))
        assert await replay(journal, 6000, 1500) == whole[200 * 1500 :]


async def test_what_was_read_ahead_and_is_too_old_is_read_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [run(seq, STORED_BYTES_MAX) for seq in range(1, 6)]
    now = trio.current_time
    async with of_store(server) as journal:
        await applied(journal, Create(record()))
        await filled(journal, runs)
        [first] = await journal.read("s", 0, bytes_max=SHARE)
        before = sent_bytes(server)
        monkeypatch.setattr(trio, "current_time", lambda: now() + AHEAD_S)
        [second] = await journal.read("s", 1, bytes_max=SHARE)
        monkeypatch.undo()
        assert [first, second] == runs[:2]
        assert sent_bytes(server) - before >= STORED_BYTES_MAX


async def test_few_streams_are_read_ahead_at_a_time(server: Server) -> None:
    streams = [f"s{n}" for n in range(2 * AHEAD_MAX)]
    runs = [run(seq, STORED_BYTES_MAX) for seq in range(1, 4)]
    async with of_store(server) as journal:
        for number, stream in enumerate(streams):
            await applied(journal, Create(record(stream, number=number)))
            await filled(journal, runs, stream)
            await journal.read(stream, 0, bytes_max=SHARE)
        before = sent_bytes(server)
        for stream in streams:
            await journal.read(stream, 0, bytes_max=SHARE)
        read_again = sent_bytes(server) - before
        reads = len(streams) + AHEAD_MAX  # each its own, and those that are read ahead
        assert read_again <= reads * READS_MAX * STORED_BYTES_MAX + OVERHEAD
        for stream in streams:
            assert is_whole(await replay(journal, 3, stream=stream), runs)


async def test_a_connection_that_is_lost_while_it_reads_ahead_costs_nothing(
    server: Server,
) -> None:
    runs = [run(seq, STORED_BYTES_MAX) for seq in range(1, 6)]
    async with of_store(server) as journal:
        await applied(journal, Create(record()))
        await filled(journal, runs)
        body, after = b"", 0
        while after < len(runs):
            try:
                [found] = await journal.read("s", after, bytes_max=SHARE)
            except Unavailable:  # the connection was lost under the read itself
                continue
            body, after = body + found.body, found.last
            server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert is_whole(body, runs)


async def test_a_store_that_stops_while_it_reads_ahead_is_unavailable_in_time(
    server: Server,
) -> None:
    runs = [run(seq, STORED_BYTES_MAX) for seq in range(1, 8)]
    async with of_store(server, call_s=QUICK_S) as journal:
        await applied(journal, Create(record()))
        await filled(journal, runs)
        await journal.read("s", 0, bytes_max=SHARE)
        server.pause()
        try:
            # Lines that were sent before the pause may still be read.
            with pytest.raises(Unavailable), trio.fail_after(PATIENCE_S):
                await replay(journal, len(runs), after=1)
        finally:
            server.resume()
        with trio.fail_after(PATIENCE_S):
            while True:
                try:
                    body = await replay(journal, len(runs))
                except Unavailable:
                    continue
                break
        assert is_whole(body, runs)


async def commands_of_reads(server: Server, journal: Journal, *afters: int) -> int:
    """How often the store is asked for lines by these reads, which find some."""
    before = asked(server)
    for after in afters:
        assert await journal.read("s", after, bytes_max=SHARE)
    return asked(server) - before


def asked(server: Server) -> int:
    told = server.ask("INFO", "commandstats").decode()
    found = re.search(r"cmdstat_xrange:calls=(\d+)", told)
    return int(found[1]) if found else 0


async def test_the_store_is_not_asked_for_what_this_replica_has_just_written(
    server: Server,
) -> None:
    runs = [run(1, 100), run(2, 100, count=3), run(5, 100)]
    async with open_redis_journal(server.url) as journal:
        await applied(journal, Create(record()))
        await filled(journal, runs)
        assert await commands_of_reads(server, journal, 0, 1, 3, 4) == 0
        assert await replay(journal, 5) == b"".join(each.body for each in runs)
        await applied(journal, Ack("s", 1, 4))
        with pytest.raises(Missing):
            await journal.read("s", 1, bytes_max=SHARE)
        assert await commands_of_reads(server, journal, 4) == 0


async def test_lines_of_a_stream_that_another_replica_has_claimed_are_read_from_the_store(
    server: Server,
) -> None:
    async with open_redis_journal(server.url) as dead, open_redis_journal(server.url) as heir:
        await applied(dead, Create(record()))
        await filled(dead, [run(1, 100)])
        await heir.claim(dead.replica)
        assert await dead.renew() is None
        assert await commands_of_reads(server, dead, 0) == 1
        assert await commands_of_reads(server, heir, 0) == 1


async def test_lines_are_read_from_the_store_again_after_it_has_gone_back(
    server: Server,
) -> None:
    async with open_redis_journal(server.url) as journal:
        await applied(journal, Create(record()))
        await filled(journal, [run(1, 100)])
        server.ask("HSET", "{mcp-streams}:commits", journal.replica, "1")
        await filled(journal, [run(2, 100)])  # and all before it once more
        assert await commands_of_reads(server, journal, 0)
        assert await replay(journal, 2) == run(1, 100, count=2).body


async def test_a_stream_that_begins_anew_has_no_lines_of_the_one_before(server: Server) -> None:
    async with open_redis_journal(server.url) as journal:
        await applied(journal, Create(record()))
        await filled(journal, [run(1, 100)])
        await applied(journal, Forget("s", 1))
        assert not await journal.read("s", 0, bytes_max=SHARE)
