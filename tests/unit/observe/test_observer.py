"""A program that runs a server itself has its log, its metrics and a drain."""

import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from streams import (
    Client,
    HttpEndpoint,
    Keyring,
    LifespanFailed,
    MemoryJournal,
    Observer,
    RunningServer,
    Server,
    open_sqlite_journal,
)
from transports import dial, http


class Embedded:
    """A server over HTTP whose tool waits for the test."""

    def __init__(self) -> None:
        self.server = Server("embedded", resume_min_s=0)
        self.begun, self.end = trio.Event(), trio.Event()

        @self.server.tool
        async def work() -> str:
            self.begun.set()
            await self.end.wait()
            return "done"

    async def listen(self, running: RunningServer, nursery: trio.Nursery) -> str:
        async def serve(*, task_status: trio.TaskStatus[int]) -> None:
            await http.serve(
                HttpEndpoint(running, "/mcp"),
                "127.0.0.1",
                0,
                departure=running.engine.departure,
                task_status=task_status,
            )

        return f"http://127.0.0.1:{await nursery.start(serve)}/mcp"


@pytest.fixture
def embedded() -> Embedded:
    return Embedded()


async def values(observer: Observer) -> dict[str, float]:
    text, _ = await observer.metrics()
    families = text_string_to_metric_families(text.decode())
    return {each.name: each.value for family in families for each in family.samples}


@pytest.mark.parametrize("form", ["text", "json"])
async def test_calls_are_logged_and_counted(
    form: Any, embedded: Embedded, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    observer = Observer(log_calls=form, metrics=True)
    async with (
        open_sqlite_journal(tmp_path / "calls.db") as journal,
        observer.watch(
            embedded.server.open(journal, Keyring.load(None), events=observer.events)
        ) as running,
        trio.open_nursery() as nursery,
    ):
        url = await embedded.listen(running, nursery)
        async with Client(dial(url)) as client, client.call("work", {}) as call:
            await embedded.begun.wait()
            assert (await values(observer))["mcp_streams_live"] == 1
            embedded.end.set()
            await call.result()
        found = await values(observer)
        assert (found["mcp_streams_live"], found["mcp_streams_calls_total"]) == (0, 1)
        assert found["mcp_streams_journal_limit_bytes"] == running.limits.journal_bytes_max
        nursery.cancel_scope.cancel()
    [line] = [line for line in capfd.readouterr().err.splitlines() if "call ended" in line]
    if form == "json":
        assert json.loads(line)["tool"] == "work"
    else:
        assert "[calls]" in line
        assert "outcome=completed" in line


async def test_a_drain_closes_the_port_and_waits_for_the_call(embedded: Embedded) -> None:
    server = embedded.server.open(MemoryJournal(), Keyring.load(None))
    async with server as running, trio.open_nursery() as nursery:
        url = await embedded.listen(running, nursery)
        async with Client(dial(url)) as client, client.call("work", {}) as call:
            await embedded.begun.wait()
            nursery.start_soon(running.drain, 600.0)
            await running.engine.departure.begun()
            with trio.fail_after(30):
                await refused_at(url)
            embedded.end.set()
            assert (await call.result())["content"][0]["text"] == "done"
        with trio.fail_after(30):
            await running.engine.ended.wait()
        nursery.cancel_scope.cancel()


async def refused_at(url: str) -> None:
    """Wait until a new client is refused."""
    port = int(url.split(":")[2].split("/", maxsplit=1)[0])
    while True:
        try:
            await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
        except OSError:
            return
        await trio.sleep(0.01)


async def test_what_is_off_listens_to_nothing() -> None:
    observer = Observer()
    assert not observer.events.is_heard
    with pytest.raises(RuntimeError, match="metrics=True"):
        await observer.metrics()


async def test_a_server_that_does_not_run_has_no_metrics(embedded: Embedded) -> None:
    observer = Observer(metrics=True)
    with pytest.raises(RuntimeError, match="does not run"):
        await observer.metrics()
    opening = embedded.server.open(MemoryJournal(), Keyring.load(None), events=observer.events)
    async with observer.watch(opening):
        assert await values(observer)
    with pytest.raises(RuntimeError, match="does not run"):
        await observer.metrics()


async def test_an_error_of_the_start_is_the_servers_own() -> None:
    @asynccontextmanager
    async def lifespan(_: Server) -> Any:
        raise OSError("no database")
        yield

    observer = Observer(log_calls="text", metrics=True)
    server = Server("failing", lifespan=lifespan)
    opening = server.open(MemoryJournal(), Keyring.load(None), events=observer.events)
    with pytest.raises(LifespanFailed, match="no database"):
        async with observer.watch(opening):
            raise AssertionError("it has started")


async def test_a_server_with_other_events_is_refused(embedded: Embedded) -> None:
    observer = Observer(metrics=True)
    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="events=observer.events")):
        async with observer.watch(embedded.server.open(MemoryJournal(), Keyring.load(None))):
            raise AssertionError("it is watched")


def test_wrong_settings_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="log_calls 'xml'"):
        Observer(log_calls="xml")  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "streams.observe.metrics", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"pip install 'mcp-streams\[metrics\]'"):
        Observer(metrics=True)
