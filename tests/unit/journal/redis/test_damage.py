"""Keys of a journal that another program has written to, and rights that a user has lost.

One stream, session or post suffers; or all replicas wait, say why, and go on once it is mended.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
import trio

from streams import Server as McpServer
from streams.errors import JournalUnusable, Missing, StoreAway, Unavailable
from streams.journal.records import Ack, Create, Restore
from streams.journal.redis import open_redis_journal
from streams.journal.redis.journal import RedisJournal
from streams.journal.sessions import SaveGrant, SaveSession
from streams.journal.webhooks import SaveWebhook, Webhook
from streams.keys import Keyring, new_keys
from streams.limits import Limits
from streams.server.storage import Place, open_storage
from tests.rigs.journals import (
    PATIENCE_S,
    PLENTY,
    append,
    applied,
    as_one,
    grant,
    lines,
    read_all,
    record,
    session,
    until_done,
)
from tests.rigs.redis_servers import KINDS, Server, running
from tests.rigs.replicas import Reached, Replica
from tests.rigs.server import PLAIN, POSITIONS, Json, Talker, named, said
from tests.rigs.web import Browser

LEASE_S = 1.0
P = "{mcp-streams}:"


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with running(request.param, tmp_path / "server") as server:
        yield server


def warned(logs: list[Any], key: str) -> int:
    """How many warnings name this key."""
    return sum(key in str(entry) for entry in logs if entry["log_level"] == "warning")


async def waits(journal: RedisJournal, *changes: Any) -> str:
    """Why the journal takes no changes now."""
    with pytest.raises(StoreAway) as caught:
        await journal.commit(changes)
    return str(caught.value)


# One stream


FOREIGN: tuple[tuple[str, ...], ...] = (
    ("XADD", "l:s", "*", "foo", "bar"),
    ("XADD", "l:s", "*", "b", "no line"),
    ("XADD", "l:s", "4-0", "b", "no line\n"),
    ("XADD", "l:s", "4-1", "b", "{}\n"),
    ("XADD", "l:s", "18446744073709551615-18446744073709551615", "b", "no line"),
)


@pytest.mark.parametrize("command", FOREIGN)
async def test_a_foreign_entry_among_lines_is_ignored_and_goes(
    server: Server, command: tuple[str, ...]
) -> None:
    async with open_redis_journal(server.url) as journal:
        await applied(journal, Create(record()), append(1, 3), Ack("s", 1, 1))
        verb, key, *rest = command
        assert server.ask(verb, P + key, *rest).startswith(b"$")
        with structlog.testing.capture_logs() as logs:
            if command[2] != "4-1":  # which is as one of ours
                assert as_one(await journal.read("s", 1, bytes_max=PLENTY)) == lines(2, 3)
                assert await journal.read("s", 3, bytes_max=PLENTY) == []
                assert warned(logs, P + "l:s") == 1
            await applied(journal, append(4, 4), Create(record("t")), append(1, 1, stream="t"))
            await applied(journal, append(5, 5))
        assert await read_all(journal, 1) == lines(2, 5).body


async def test_a_record_that_was_deleted_is_put_back_by_its_owner(server: Server) -> None:
    """As after a failover: see `Restore`. The lines of before count as lost."""
    async with open_redis_journal(server.url) as journal:
        await applied(journal, Create(record()), append(1, 3))
        known = await journal.find("s")
        assert known is not None
        server.ask("DEL", P + "r:s")
        [answer] = await journal.commit([append(4, 4)])
        assert answer is not None
        await applied(journal, Restore(1, known), append(4, 4))
        found = await journal.find("s")
        assert found is not None
        assert (found.last, found.lost) == (4, (1, 3))
        assert as_one(await journal.read("s", 3, bytes_max=PLENTY)) == lines(4, 4)


@pytest.mark.parametrize(
    "command",
    [
        ("HSET", "r:s", "p", "nonsense"),
        ("HSET", "r:s", "k", "nonsense"),
        ("HSET", "r:s", "i", "nonsense"),
        ("HDEL", "r:s", "k"),
        ("SET", "r:s", "x"),
    ],
)
async def test_a_record_that_cannot_be_read_is_unknown_and_owned_by_no_replica(
    server: Server, command: tuple[str, ...]
) -> None:
    verb, key, *rest = command
    async with (
        open_redis_journal(server.url) as dead,
        open_redis_journal(server.url) as heir,
    ):
        await applied(dead, Create(record()), append(1, 3), Create(record("t")))
        known = await dead.find("s")
        assert known is not None
        server.ask(verb, P + key, *rest)
        with structlog.testing.capture_logs() as logs:
            assert await heir.find("s") is None
            assert await heir.find("s") is None
            assert await heir.follow("s") is None
            assert await heir.take("s") is None
            assert [each.stream for each in await dead.owned(after=0, limit=9)] == ["t"]
            if verb != "HDEL":
                assert warned(logs, P + key) <= 2, "once, and once from a function"
                assert warned(logs, P + key) >= 1
        with trio.fail_after(PATIENCE_S):
            assert [each.stream for each in await heir.claim(dead.replica)] == ["t"]
            assert await heir.claim(dead.replica) == []


async def test_a_record_that_cannot_be_read_is_in_no_copy(server: Server) -> None:
    async with open_redis_journal(server.url) as journal:
        await applied(journal, Create(record()))
        server.ask("HSET", P + "r:s", "p", "nonsense")
        with pytest.raises(JournalUnusable, match="r:s cannot be read"):
            await journal.streams(0, 10)


@pytest.mark.parametrize("key", ["l:s", "r:s", "f:s", "g:s", "m:" + "n" * 16])
async def test_a_stream_with_a_key_of_another_type_harms_no_other(server: Server, key: str) -> None:
    async with open_redis_journal(server.url, cache_bytes_max=0) as journal:
        change = Create(record(), (b"n" * 16,))
        await applied(journal, change, append(1, 3), Create(record("t")))
        await applied(journal, SaveSession(session()), SaveGrant(grant()))
        await journal.follow("s")
        server.ask("DEL", P + key)
        server.ask("RPUSH", P + key, "x")
        answers = await journal.commit([append(4, 4), append(1, 2, stream="t")])
        assert answers[1] is None
        assert (answers[0] is None) == (key != "r:s")
        assert as_one(await journal.read("t", 0, bytes_max=PLENTY)) == lines(1, 2)
        await journal.grants("s")
        await journal.named(b"n" * 16)
        await journal.sessions()
        await journal.follow("s")
        if key == "l:s":
            with pytest.raises(Missing):
                await journal.read("s", 1, bytes_max=PLENTY)
        await applied(journal, append(3, 3, stream="t"))


async def test_grants_that_cannot_be_read_are_left_out(server: Server) -> None:
    async with open_redis_journal(server.url) as journal:
        await applied(journal, Create(record()), SaveSession(session()), SaveGrant(grant()))
        server.ask("HSET", P + "g:s", "foo", "bar")
        server.ask("HSET", P + "sg:k", "foo", "bar")
        assert await journal.grants("s") == [grant()]
        assert (await journal.sessions())[1] == [grant()]
        await applied(journal, SaveGrant(grant(delivery="e")))
        assert len(await journal.grants("s")) == 2


@pytest.mark.parametrize(
    "command", [("HSET", "s:k", "r", "nonsense"), ("SET", "s:k", "x"), ("HDEL", "s:k", "r")]
)
async def test_a_session_that_cannot_be_read_is_unknown(
    server: Server, command: tuple[str, ...]
) -> None:
    verb, key, *rest = command
    async with open_redis_journal(server.url) as journal:
        await applied(journal, SaveSession(session()), SaveSession(session("other")))
        server.ask(verb, P + key, *rest)
        with structlog.testing.capture_logs() as logs:
            assert await journal.session("k") is None
            assert [each.key for each in (await journal.sessions())[0]] == ["other"]
            assert warned(logs, P + "s:k") == (verb != "HDEL")
        await applied(journal, SaveSession(session()))
        assert await journal.session("k") == session()


@pytest.mark.parametrize("index", ["o:", "n", "e", "u"])
async def test_a_foreign_member_of_an_index_leads_nowhere(server: Server, index: str) -> None:
    async with open_redis_journal(server.url) as journal:
        await applied(journal, Create(record()))
        server.ask("ZADD", P + index, "0", "\udcff\udcfe no stream")
        assert await journal.claim() == []
        assert await journal.due(limit=9) == []
        assert [each.stream for each, _ in await journal.streams(0, 9)] == ["s"]
        await applied(journal, append(1, 1))


# Posts and news


async def test_posts_that_cannot_be_read_are_dropped(server: Server) -> None:
    async with (
        open_redis_journal(server.url) as one,
        open_redis_journal(server.url) as two,
    ):
        await applied(one, Create(record()))
        inbox = f"{P}in:{one.replica}"
        server.ask("XADD", inbox, "*", "foo", "bar")
        no_text = ("s", "\udcff", "c", "1", "t", "s", "b", "x")
        server.ask("XADD", inbox, "*", *no_text)
        assert await two.post("s", b"hello")
        with structlog.testing.capture_logs() as logs, trio.fail_after(PATIENCE_S):
            assert [post.body for post in (await one.news()).posts] == [b"hello"]
            assert await two.post("s", b"again")
            assert [post.body for post in (await one.news()).posts] == [b"again"]
        assert warned(logs, inbox) == 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.news)
            with trio.fail_after(PATIENCE_S):
                while server.ask("XLEN", inbox) != b":0\r\n":  # soon after they were received
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        server.ask("XADD", inbox, "*", "foo", "bar")
        assert [each.stream for each in await two.claim(one.replica)] == ["s"]


async def test_an_inbox_of_another_type_is_deleted(server: Server) -> None:
    async with (
        open_redis_journal(server.url) as one,
        open_redis_journal(server.url) as two,
    ):
        await applied(one, Create(record()))
        server.ask("SET", f"{P}in:{one.replica}", "x")
        assert await two.post("s", b"hello")
        with trio.fail_after(PATIENCE_S):
            assert [post.body for post in (await one.news()).posts] == [b"hello"]


async def test_a_foreign_message_on_a_channel_is_no_news(server: Server) -> None:
    async with open_redis_journal(server.url) as journal:
        await applied(journal, Create(record()))
        await journal.follow("s")
        entry = "p1-1\0\udcff\0001\0s\0body"
        for message in ("c\udcff\udcfe", "\udcff", "", "p", "p1-1\0s", entry, "cs"):
            server.ask("SPUBLISH", f"{P}c:{journal.replica}", message)
        with trio.fail_after(PATIENCE_S):
            assert (await journal.news()).changed == {"s"}


# Keys that all streams share


async def test_a_foreign_field_among_replicas_is_ignored(server: Server) -> None:
    async with (
        open_redis_journal(server.url) as one,
        open_redis_journal(server.url) as two,
    ):
        await applied(one, Create(record()))
        await two.renew()
        names = {one.replica, two.replica}
        for field in ("foo", "\udcff", one.replica):
            server.ask("HSET", P + "replicas", field, "nonsense")
            server.ask("HSET", P + "commits", field, "nonsense")
            server.ask("HSET", P + "schemas", field, "nonsense")
            server.ask("HSET", P + "epochs", field, "nonsense")
            server.ask("HSET", P + "settings", field, "nonsense")
        with structlog.testing.capture_logs() as logs:
            assert (await two.renew() or {}).keys() == names
            assert (await two.renew() or {}).keys() == names
        assert warned(logs, P + "replicas") == 1
        await two.send("", "", b"to all")
        await applied(one, append(1, 3))
        assert (await until_counted(one)).keys() == names
        assert await one.told() == {}
        assert [each.stream for each in await two.claim(one.replica)] == ["s"]


async def until_counted(journal: RedisJournal) -> dict[str, int]:
    found: dict[str, int] = {}

    async def renew() -> None:
        found.update(await journal.renew() or {})

    await until_done(renew)
    return found


@pytest.mark.parametrize("number", ["nonsense", "-5", "1e300", "nan", "99999999"])
async def test_a_foreign_number_of_a_commit_costs_nothing(server: Server, number: str) -> None:
    async with open_redis_journal(server.url) as journal:
        await applied(journal, Create(record()), append(1, 3))
        server.ask("HSET", P + "commits", journal.replica, number)

        async def go_on() -> None:
            await journal.renew()
            await applied(journal, append(4, 4))

        await until_done(go_on)
        assert await read_all(journal) == lines(1, 4).body


@pytest.mark.parametrize(
    "command",
    [
        ("HSET", "journal", "bytes", "nonsense"),
        ("HSET", "journal", "schema", "nonsense"),
        ("HSET", "journal", "epoch", "nonsense"),
        ("SET", "journal", "x"),
        ("SET", "replicas", "x"),
        ("SET", "commits", "x"),
        ("SET", "n", "x"),
    ],
)
async def test_replicas_wait_until_a_key_that_all_share_is_repaired(
    server: Server, command: tuple[str, ...]
) -> None:
    verb, key, *rest = command
    async with open_redis_journal(server.url) as journal:
        await applied(journal, Create(record()), append(1, 3))
        server.ask("COPY", P + key, "kept")
        server.ask(verb, P + key, *rest)
        with structlog.testing.capture_logs() as logs:
            why = []
            for number in range(3):
                for call in (
                    lambda n=number: journal.commit([Create(record(f"t{n}", number=n + 1))]),
                    journal.renew,
                ):
                    try:
                        await call()
                    except StoreAway as error:
                        why.append(str(error))
        assert len(why) >= 3
        assert all(P + key in each and "delete what it has written" in each for each in why)
        assert warned(logs, P + key) <= 2, "once for each field"
        server.ask("COPY", "kept", P + key, "REPLACE")
        await applied(journal, append(4, 4))
        assert await journal.renew()
        assert await read_all(journal) == lines(1, 4).body


async def test_the_error_of_a_plain_command_names_the_key(server: Server) -> None:
    async with open_redis_journal(server.url) as journal:
        server.ask("SET", P + "n", "x")
        with pytest.raises(StoreAway, match=r"\{mcp-streams\}:n: .*delete what it has written"):
            await journal.totals()


# Rights


@pytest.mark.parametrize("right", ["fcall", "xrange", "hmget", "ssubscribe"])
async def test_a_right_that_was_withdrawn_is_waited_for(server: Server, right: str) -> None:
    rights = ("~*", "&*", "+@all")
    server.ask("ACL", "SETUSER", "mcp", "on", ">secret", *rights)
    url = server.url.replace("redis://", "redis://mcp:secret@")
    async with open_redis_journal(url, call_s=1.0, cache_bytes_max=0) as journal:
        await applied(journal, Create(record()), append(1, 3))
        server.ask("ACL", "SETUSER", "mcp", f"-{right}")
        journal.listener.listen_anew()
        with structlog.testing.capture_logs() as logs:
            refused = 0
            with trio.fail_after(PATIENCE_S):
                while refused < 3 or not warned(logs, right):
                    try:
                        await journal.find("s")
                        await journal.read("s", 0, bytes_max=PLENTY)
                        await journal.commit([append(4, 4)])
                    except Unavailable:
                        pass
                    refused += 1
                    await trio.sleep(0.05)
        assert warned(logs, right) == 1
        if right == "fcall":
            with pytest.raises(JournalUnusable, match=r"may not do this.*fcall"):
                async with open_redis_journal(url):
                    pass
        server.ask("ACL", "SETUSER", "mcp", f"+{right}")
        await until_done(lambda: applied(journal, append(4, 4)))
        assert await read_all(journal) == lines(1, 4).body
        await journal.follow("s")
        with trio.fail_after(PATIENCE_S):
            assert (await journal.news()).is_all


async def test_a_password_that_is_asked_for_later_is_waited_for(server: Server) -> None:
    async with open_redis_journal(server.url, call_s=1.0) as journal:
        await applied(journal, Create(record()))
        server.ask("CONFIG", "SET", "requirepass", "secret")
        journal._writer.link.drop()
        assert "wants a password" in await waits(journal, append(1, 1))
        server.ask("CONFIG", "SET", "requirepass", "", login=("AUTH", "secret"))
        await until_done(lambda: applied(journal, append(1, 1)))


# The keys of tokens


async def test_keys_that_were_deleted_are_put_back(server: Server) -> None:
    async with open_redis_journal(server.url) as journal:
        journal.know_keys(await journal.save_keys(b"the keys"))
        await journal.renew()
        server.ask("DEL", P + "keys")
        await journal.renew()
        await journal.renew()
        assert await journal.keys() == b"the keys"


async def test_other_keys_in_the_store_are_told_once_and_stay(server: Server) -> None:
    async with open_redis_journal(server.url) as journal:
        journal.know_keys(await journal.save_keys(b"the keys"))
        server.ask("SET", P + "keys", "others")
        with structlog.testing.capture_logs() as logs:
            for _ in range(3):
                await journal.renew()
        assert warned(logs, P + "keys") == 1
        assert server.ask("GET", P + "keys").split()[1] == b"others"


async def test_a_server_that_starts_waits_for_the_keys_of_those_that_run(server: Server) -> None:
    place = Place(journal=server.url, lease_s=LEASE_S)
    async with open_storage(place, Limits()) as (one, keys):
        server.ask("DEL", P + "keys")

        async def beat() -> None:
            while True:
                await trio.sleep(LEASE_S / 4)
                await one.renew()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(beat)
            async with open_storage(place, Limits()) as (_, theirs):
                assert theirs.keyring.fingerprints == keys.keyring.fingerprints
            nursery.cancel_scope.cancel()


async def test_what_is_no_key_is_not_put_back(server: Server) -> None:
    place = Place(journal=server.url, lease_s=LEASE_S)
    async with open_storage(place, Limits()) as (journal, keys):
        made = await journal.keys()
        server.ask("SET", P + "keys", "short")
        with structlog.testing.capture_logs() as logs:
            assert not await keys.reload()
        assert f"{P}keys in {server.url} does not hold keys" in logs[-1]["why"]
        server.ask("DEL", P + "keys")
        await journal.renew()
        await journal.renew()
        assert await journal.keys() == made


async def test_a_server_makes_keys_where_none_comes_back(server: Server) -> None:
    place = Place(journal=server.url, lease_s=LEASE_S)
    async with open_storage(place, Limits()) as (journal, keys):
        await applied(journal, Create(record()))
        server.ask("DEL", P + "keys")
        with structlog.testing.capture_logs() as logs:
            async with open_storage(place, Limits()) as (_, theirs):
                assert theirs.keyring.fingerprints != keys.keyring.fingerprints
        assert warned(logs, "calls but no keys") == 1


# Servers


@asynccontextmanager
async def two_replicas(server: Server) -> AsyncIterator[tuple[Replica, Replica]]:
    """Two servers over one journal in the store."""
    keyring = Keyring.parse(new_keys(), "the test's keys")
    async with (
        open_redis_journal(server.url, lease_s=LEASE_S) as first,
        open_redis_journal(server.url, lease_s=LEASE_S) as second,
        trio.open_nursery() as nursery,
    ):
        found = []
        for journal in (first, second):
            mcp = McpServer("tested", resume_min_s=0, announce_after_s=0)
            replica = Replica(mcp, cast(Reached, journal), None)
            await nursery.start(replica.run, keyring)
            found.append(replica)
        yield found[0], found[1]
        for replica in found:
            await replica.stop()


async def began(replica: Replica, *sent: str) -> tuple[Talker, Json]:
    talker = await replica.dial(POSITIONS)
    stream = await talker.begin(1, "again")
    replica.again.log(*sent)
    for text in sent:
        await talker.find(lambda message, text=text: text in said([message]))
    return talker, stream


ATTACKS: tuple[tuple[str, ...], ...] = (
    ("XADD", "l:{stream}", "*", "foo", "bar"),
    ("DEL", "l:{stream}"),
    ("SET", "l:{stream}", "x"),
    ("DEL", "r:{stream}"),
    ("SET", "r:{stream}", "x"),
    ("HSET", "r:{stream}", "p", "nonsense"),
    ("HSET", "r:{stream}", "k", "nonsense"),
    ("HSET", "r:{stream}", "i", "nonsense"),
    ("SET", "f:{stream}", "x"),
    ("SET", "g:{stream}", "x"),
    ("XADD", "in:{replica}", "*", "foo", "bar"),
    ("XADD", "in:{replica}", "*", "d", "x", "c", "1", "t", "{stream}", "b", "nonsense"),
    ("SET", "in:{replica}", "x"),
    ("HSET", "replicas", "foo", "bar"),
    ("HSET", "replicas", "{replica}", "bar"),
    ("HSET", "commits", "{replica}", "bar"),
    ("HSET", "settings", "{replica}", "bar"),
    ("ZADD", "o:{replica}", "0", "bar"),
)


@pytest.mark.parametrize("attack", ATTACKS)
async def test_the_call_goes_on_and_so_do_all_others(
    server: Server, attack: tuple[str, ...]
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with two_replicas(server) as (ours, theirs):
            hit, stream = await began(ours, "a", "b")
            mate = await ours.dial(POSITIONS)
            other, _ = await began(theirs, "x")
            names = {"stream": stream["streamId"], "replica": ours.journal.replica}
            verb, key, *rest = (word.format(**names) for word in attack)
            server.ask(verb, P + key, *rest)
            ours.again.log("c")
            await hit.find(lambda message: "c" in said([message]))
            theirs.again.log("y")
            await other.find(lambda message: "y" in said([message]))
            await mate.call(2, "step")
            ours.steps.finish("fine")
            assert (await mate.answer(2))["result"]
            await trio.sleep(2 * LEASE_S)
            ours.again.finish("done")
            assert (await hit.answer(1))["result"]
            theirs.again.finish("done")
            assert (await other.answer(1))["result"]


async def test_a_client_is_told_of_lines_that_were_deleted(server: Server) -> None:
    with trio.fail_after(PATIENCE_S):
        async with two_replicas(server) as (ours, theirs):
            talker, stream = await began(ours, "a", "b", "c")
            server.ask("DEL", f"{P}l:{stream['streamId']}")
            elsewhere = await theirs.dial(POSITIONS)
            await elsewhere.ask("resume", "stream/resume", **named(stream), after=1)
            refused = (await elsewhere.answer("resume"))["error"]
            assert refused["data"]["reason"] == "messages_gone"
            after = refused["data"]["earliestSeq"] - 1
            await elsewhere.ask("again", "stream/resume", **named(stream), after=after)
            ours.again.log("d")
            await elsewhere.find(lambda message: "d" in said([message]))
            ours.again.finish("done")
            await elsewhere.answer(1)
            assert talker is not elsewhere


async def test_an_unreadable_session_is_unknown_over_http(server: Server) -> None:
    with trio.fail_after(PATIENCE_S):
        async with two_replicas(server) as (ours, theirs):
            browser = Browser(ours, ours.nursery)
            hello = {"protocolVersion": "2025-11-25", "capabilities": PLAIN, "clientInfo": {}}
            asked = browser.ask(
                "POST", {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
            )
            while not asked.is_whole:
                await trio.sleep(0.01)
            found = server.ask("ZRANGE", P + "sessions", "0", "-1").split(b"\r\n")
            key = found[2].decode()
            server.ask("HSET", f"{P}s:{key}", "r", "nonsense")
            stranger = Browser(theirs, theirs.nursery, asked.headers["mcp-session-id"])
            with structlog.testing.capture_logs() as logs:
                answer = stranger.ask("POST", {"jsonrpc": "2.0", "id": 2, "method": "ping"})
                while not answer.is_whole:
                    await trio.sleep(0.01)
            assert answer.status == 404
            assert warned(logs, f"{P}s:{key}") == 1


async def test_servers_wait_for_a_right_and_end_no_call(server: Server) -> None:
    server.ask("ACL", "SETUSER", "default", "on", "nopass", "~*", "&*", "+@all")
    with trio.fail_after(PATIENCE_S):
        async with two_replicas(server) as (ours, theirs):
            talker, _ = await began(ours, "a")
            await trio.sleep(LEASE_S)
            server.ask("ACL", "SETUSER", "default", "-fcall")
            ours.again.log("b")
            await trio.sleep(3 * LEASE_S)
            assert ours.running.engine.unready
            server.ask("ACL", "SETUSER", "default", "+fcall")
            while ours.running.engine.unready or theirs.running.engine.unready:
                await trio.sleep(0.01)
            assert ours.streams
            ours.again.finish("done")
            assert talker.seen


@pytest.mark.parametrize("body", ["nonsense", "\x04aa", "1"])
async def test_a_webhook_that_cannot_be_read_is_dropped(server: Server, body: str) -> None:
    good = Webhook("good", "s", "https://a.example/", b"{}", 1.0)
    negative = Webhook("negative", "s", "https://a.example/", b"{}", 1.0, -1)
    async with open_redis_journal(server.url) as journal:
        await applied(journal, SaveWebhook(good), SaveWebhook(negative))
        server.ask("HSET", P + "webhooks", "b\r\nad", body)
        server.ask("ZADD", P + "webhooks_due", "1", "b\r\nad")
        with structlog.testing.capture_logs() as logs:
            taken = await journal.take_webhooks(2.0, 60.0, limit=9)
        assert [each.id for each in taken] == ["good"]
        assert warned(logs, r"b'b\\r\\nad'") == warned(logs, "negative") == 1
        assert await journal.count_webhooks() == 1
