"""The metrics are as Prometheus' conventions want them, and readers of both formats take them."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain
from prometheus_client.samples import Sample
from trio.testing import wait_all_tasks_blocked

from streams import Server
from streams.engine.events import Events
from streams.errors import StoreAway
from streams.journal.contract import Journal
from streams.journal.memory import MemoryJournal
from streams.journal.sqlite import open_sqlite_journal
from streams.observe.metrics import PREFIX, Metrics
from streams.observe.registry import Registry
from streams.observe.tallies import ChildCounts, Tallies
from tests.rigs.server import POSITIONS, House, Steps, open_house

OPEN_METRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
# The end of a name tells its unit; others are counts of what the name says.
UNITS = ("_seconds", "_bytes", "_messages", "_total", "_info")
BARE = {
    *("ready", "live", "asking", "questions_open", "attached", "ended", "evicted", "connections"),
    *("sessions", "store_up", "journal_short", "webhooks_queued", "children", "replicas"),
}


@pytest.fixture
def server() -> Server:
    return Server("tested", resume_min_s=0, resume_max_s=600, announce_after_s=0)


class Observed:
    """A server whose metrics are read."""

    def __init__(self, house: House, metrics: Metrics) -> None:
        self.house = house
        self.metrics = metrics

    async def text(self) -> str:
        return (await self.metrics.render())[0].decode()

    async def samples(self) -> list[Sample]:
        return [each for family in plain(await self.text()) for each in family.samples]

    async def value(self, name: str, **labels: str) -> float:
        (found,) = [
            each.value
            for each in await self.samples()
            if each.name == PREFIX + name and each.labels == labels
        ]
        return float(found)


@asynccontextmanager
async def observed(
    server: Server,
    journal: Journal | None = None,
    *,
    bytes_max: int = 0,
    child_counts: ChildCounts | None = None,
) -> AsyncIterator[Observed]:
    events, tallies = Events(), Tallies()
    tallies.listen_to(events)
    async with open_house(server, journal=journal, events=events) as house:
        engine = house.running.engine
        tallies.measure(engine)
        metrics = Metrics(
            engine,
            house.journal,
            Registry(house.journal, engine),
            tallies,
            bytes_max=bytes_max,
            child_counts=child_counts,
        )
        yield Observed(house, metrics)


async def used(found: Observed, server: Server) -> None:
    """A server that has something of everything to tell."""
    steps = Steps(server)
    talker = await found.house.dial(POSITIONS)
    await talker.begin(1, "step")
    steps.log("one", "two")
    steps.finish()
    await talker.answer(1)
    await talker.begin(2, "step")
    steps.ask()
    await wait_all_tasks_blocked()


async def test_a_reader_of_each_format_takes_them(server: Server, tmp_path: Path) -> None:
    async with (
        open_sqlite_journal(tmp_path / "j.db") as journal,
        observed(server, journal, child_counts=lambda: (2, 1)) as found,
    ):
        await used(found, server)
        text, media_type = await found.metrics.render()
        assert media_type.startswith("text/plain")
        names = {family.name for family in plain(text.decode())}
        other, media_type = await found.metrics.render(OPEN_METRICS)
        assert media_type.startswith("application/openmetrics-text")
        assert {each.name for each in openmetrics(other.decode())} == names
        assert {"process_resident_memory_bytes", "mcp_streams_commit_seconds"} <= names


async def test_names_have_units_and_help(server: Server) -> None:
    async with observed(server, bytes_max=5, child_counts=lambda: (2, 1)) as found:
        await used(found, server)
        families = [each for each in plain(await found.text()) if each.name.startswith(PREFIX)]
    for family in families:
        name = family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else "")
        assert name.endswith(UNITS) or name in BARE, name
        assert re.fullmatch(r"[a-z0-9_]+", name)
        assert family.documentation.endswith("."), name
        assert family.type in ("gauge", "counter", "histogram"), name


async def test_they_tell_what_lives(server: Server) -> None:
    async with observed(server) as found:
        await used(found, server)
        assert await found.value("live") == 1
        assert await found.value("questions_open") == 1
        assert await found.value("pending_messages") > 0
        assert await found.value("pending_bytes") > 0
        assert await found.value("connections", transport="memory") == 1
        assert await found.value("connections", transport="http") == 0
        assert await found.value("calls_total", tool="step", outcome="completed") == 1
        assert await found.value("call_duration_seconds_count", tool="step") == 1
        assert await found.value("store_up") == await found.value("ready") == 1


async def test_they_tell_how_large_the_journal_is(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    async with (
        open_sqlite_journal(path) as journal,
        observed(server, journal, bytes_max=1 << 30) as found,
    ):
        await used(found, server)
        wal = path.with_name("j.db-wal")
        assert await found.value("journal_bytes", part="file") == path.stat().st_size > 0
        assert await found.value("journal_bytes", part="wal") == wal.stat().st_size > 0
        assert await found.value("journal_limit_bytes") == 1 << 30


async def test_they_tell_of_children_where_there_are_any(server: Server) -> None:
    async with observed(server, child_counts=lambda: (3, 2)) as found:
        assert await found.value("children") == 3
        assert await found.value("child_restarts_total") == 2
    async with observed(server) as found:
        assert "mcp_streams_child" not in await found.text()


class Away(MemoryJournal):
    """A store that does not answer."""

    async def count_webhooks(self) -> int:
        raise StoreAway("127.0.0.1: refused")


class Silent(MemoryJournal):
    """A store that never answers."""

    async def count_webhooks(self) -> int:
        await trio.sleep_forever()
        raise AssertionError


@pytest.mark.parametrize("journal", [Away, Silent])
async def test_a_store_that_is_away_keeps_nothing_else_back(
    server: Server, journal: type[MemoryJournal], autojump_clock: trio.testing.MockClock
) -> None:
    async with observed(server, journal()) as found:
        text = await found.text()
    assert "mcp_streams_webhooks_queued" not in text
    assert "mcp_streams_store_up 1.0" in text


async def test_a_tool_with_any_name_is_a_label(server: Server) -> None:
    name = 'a "quoted"\\ name\nin two lines'
    steps = Steps(server)
    async with observed(server) as found:
        talker = await found.house.dial()
        await talker.begin(1, "step")
        steps.finish()
        await talker.answer(1)
        found.metrics._tallies.calls[name, "completed"] += 1
        assert await found.value("calls_total", tool=name, outcome="completed") == 1


async def test_two_servers_in_one_process_have_metrics_of_their_own(server: Server) -> None:
    other = Server("other", announce_after_s=0)
    async with observed(server) as first, observed(other) as second:
        await used(first, server)
        assert await first.value("calls_begun_total") == 2
        assert await second.value("calls_begun_total") == 0
    assert not [each for each in REGISTRY.collect() if each.name.startswith(PREFIX)]


async def test_two_scrapers_at_once_get_whole_answers(server: Server) -> None:
    texts = []
    async with observed(server) as found:

        async def scrape() -> None:
            texts.append(await found.text())

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(scrape)
    assert len({len(list(plain(text))) for text in texts}) == 1
