"""The benchmarks work, and measure nothing that is not complete and in order."""

import importlib
import re
from contextlib import asynccontextmanager, closing
from pathlib import Path
from xml.etree import ElementTree

import pytest
import trio
from msgspec.structs import replace

from benchmarks import (
    goals,
    harness,
    idle,
    publish,
    raw,
    reconnect,
    replicas,
    report,
    scale,
    store,
)
from benchmarks.__main__ import main
from benchmarks.chart import Bar, bar_chart
from benchmarks.events import Check, Event, EventParser
from benchmarks.goals import Goal, Verdict
from benchmarks.harness import QUICK, Measured, Plan, Results, Row, Subject, Suite
from benchmarks.numbered import FIRST, METHOD, Lost, check_messages, lines_of, params, text_for
from benchmarks.peers import Missing
from benchmarks.peers.children import executable, node_module
from benchmarks.replicas import Amount, Cluster
from benchmarks.servers import http_server, stdio_server, websocket_server
from benchmarks.suites import SUITES, calls, latency, live, resume
from benchmarks.suites.peers import PEERS
from streams.journal.contract import Totals
from streams.journal.ownership import key_path
from streams.journal.sqlite import SQLiteStore
from streams.journal.sqlite.verify import inspect
from streams.keys import Keyring
from streams.messages import notification
from tests.rigs import HERE, ROOT
from tests.rigs.needing import needed

FAULTY = HERE / "faulty_fill.py"
SVG = "{http://www.w3.org/2000/svg}"
PATIENCE_S = 100
MACHINE = {"system": "Linux x86_64", "cpus": "2", "python": "CPython 3.11", "sqlite": "3.40"}
IN_HAND = {
    resume.STDIO: stdio_server,
    resume.WEBSOCKET: websocket_server,
    resume.HTTP: http_server,
}


NEEDED = {"replicas": ("redis-server", "haproxy"), "replicas-idle": ("redis-server",)}


@pytest.mark.timeout(600)  # a suite starts many servers, one after the other
@pytest.mark.parametrize("suite", SUITES)
def test_a_quick_run_measures_everything_and_writes_it_down(suite, tmp_path, capsys):
    for program in NEEDED.get(suite, ()):
        needed(program, "measure with it")
    main(["--quick", "--suite", suite, "--out", str(tmp_path)])

    (measured,) = publish.load(tmp_path / "latest.json").suites
    assert measured.name == suite
    for row in measured.rows:
        if row.role != "peer":
            assert row.median > 0 or row.unit == "B"  # so few connections may need no page
            assert len(row.figures) == QUICK.rounds
    charted = [
        row
        for row in measured.rows
        if not measured.columns or row.name.endswith(f": {measured.columns[0]}")
    ]
    if len({row.unit for row in charted}) == 1:
        picture = ElementTree.parse(tmp_path / f"{suite}.svg").getroot()
        bars = [bar.get("class") for bar in picture.iter(f"{SVG}rect")]
        shown = [row for row in charted if not row.failed]
        assert len(bars) - bars.count("bg") == len(shown)
    assert measured.title.split(":")[0] in capsys.readouterr().out


def test_one_suite_and_one_size_can_be_asked_for(tmp_path):
    main(
        ["--quick", "--suite", "latency", "--size", "200", "--rounds", "2", "--out", str(tmp_path)]
    )

    (measured,) = publish.load(tmp_path / "latest.json").suites
    assert {row.size for row in measured.rows} == {200}
    assert all(len(row.figures) == 2 for row in measured.rows)


@pytest.mark.parametrize("asked", [["--size", "7"], ["--rounds", "0"], ["--suite", "none"]])
def test_what_cannot_be_measured_is_refused(asked, tmp_path):
    with pytest.raises(SystemExit) as refused:
        main([*asked, "--out", str(tmp_path)])
    assert refused.value.code == 2


@pytest.mark.parametrize("mistake", ["lossy", "twisted", "curt"])
@pytest.mark.parametrize("transport", resume.RAW_READERS)
async def test_a_server_that_loses_or_reorders_is_found_out(tmp_path, transport, mistake):
    opening = {**IN_HAND, resume.EVENTS: http_server}[transport]
    _, reader = resume.RAW_READERS[transport]
    with trio.fail_after(PATIENCE_S):
        async with opening(f"{FAULTY}:{mistake}", tmp_path / "journal.db") as served:
            with pytest.raises(Lost):
                await resume.resumed_raw(reader, served, 50, 200)
            if transport in IN_HAND:
                with pytest.raises(Lost):
                    await resume.resumed_in_hand(served, 50, 200)
            if transport == resume.WEBSOCKET:
                with pytest.raises(Lost):
                    await live.followed(served, 1, 50, 200)
                with pytest.raises(Lost):
                    await replicas.stored([served], Amount(2, 100, 200))
                tails = replicas.tails(Cluster([served], served), 50, 200, at_owner=True)
                with pytest.raises(Lost):
                    await tails.figure(min)()


def suite_of(*subjects, rounds=1, warms_up=True):
    @asynccontextmanager
    async def opened(plan, folder):
        yield subjects

    return Suite("some", "Some", opened, rounds, warms_up)


def figures_of(*figures):
    left = list(figures)

    async def measure():
        return left.pop(0)

    return measure


async def measured_once(tmp_path, suite, plan=None):
    results = await harness.run([suite], plan or Plan(), tmp_path, MACHINE)
    return results.suites[0].rows


async def test_the_first_round_warms_up_and_medians_make_the_ratios(tmp_path):
    rows = await measured_once(
        tmp_path,
        suite_of(
            Subject("a", 200, figures_of(999, 10, 40, 20), of="b"),
            Subject("b", 200, figures_of(999, 80, 100, 70)),
            rounds=3,
        ),
    )
    a, b = rows
    assert (a.figures, a.median, a.span, a.ratio) == ([10, 40, 20], 20, (10, 40), 0.25)
    assert (b.median, b.ratio) == (80, 0)


async def test_each_round_has_everything_once(tmp_path):
    order = []

    def noting(name):
        async def measure():
            order.append(name)
            return 1.0

        return measure

    subjects = [Subject(name, 0, noting(name)) for name in "ab"]
    await measured_once(tmp_path, suite_of(*subjects, warms_up=False), Plan(rounds=2))
    assert order == ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("error", "word"), [(Lost("gone"), "loses or reorders"), (TimeoutError("late"), "does not end")]
)
async def test_a_peer_that_fails_has_a_word_and_no_figure_and_the_rest_goes_on(
    tmp_path, error, word
):
    async def fail():
        raise error

    rows = await measured_once(
        tmp_path,
        suite_of(
            Subject("bad", 200, fail, role="peer"),
            Subject("gone", 200, harness.unmeasured, role="peer", missing="not installed"),
            Subject("ours", 200, figures_of(1, 2), of="bad"),
        ),
    )
    bad, gone, ours = rows
    assert (bad.failed, bad.detail, bad.figures) == (word, str(error), [])
    assert (gone.failed, gone.detail) == ("missing", "not installed")
    assert (ours.median, ours.ratio) == (2, 0)


async def test_a_run_ends_with_the_first_message_of_ours_that_is_lost(tmp_path):
    async def lose():
        raise Lost("message 25 was expected")

    with pytest.raises(Lost, match="message 25"):
        await measured_once(tmp_path, suite_of(Subject("ours", 200, lose)))


@pytest.mark.parametrize(
    ("came", "why"),
    [
        ([0, 1, 2], "3 messages have come, 4 were expected"),
        ([0, 1, 2, 3, 3], "5 messages have come, 4 were expected"),
        ([0, 2, 1, 3], "message 1 was expected: 2"),
        ([1, 2, 3], "message 0 was expected: 1"),
    ],
)
def test_each_message_has_to_come_once_and_in_order(came, why):
    lines = list(lines_of(4, 200))
    with pytest.raises(Lost, match=re.escape(why)):
        check_messages([lines[number] for number in came], 0, 4)
    assert check_messages(lines[1:], 1, 4) == 3


async def test_the_latency_of_each_message_is_measured_and_all_of_them_must_come(tmp_path):
    plan = Plan(counts={200: 1}, paced=20)
    async with latency.opened(plan, tmp_path) as subjects:
        figures = {subject.name: await subject.measure() for subject in subjects}
    assert len(figures) == 6
    for journal in (latency.NONE, latency.PROCESS, latency.POWER):
        assert 0 < figures[latency.row(journal, 50)] <= figures[latency.row(journal, 99)]


# A store, and bare clients of it


@pytest.fixture
def bare_store(tmp_path):
    needed("redis-server", "measure with it")
    with store.opened(tmp_path / "store") as found:
        yield found


async def test_a_bare_client_puts_all_into_the_store_and_takes_all_out(bare_store):
    # More than a page and a batch, and not a multiple of either.
    count = 2 * store.BATCH_BYTES // 200 + 7
    assert store.xadd(bare_store, 3, count, 200) > 0
    assert await store.xadd_by_coredis(bare_store, 3, count, 200) > 0
    for give in (store.xrange, store.lrange, store.xrange, store.lrange):
        assert give(bare_store, count, 200) > 0
    found = await store.xrange_by_coredis(bare_store, count, 200)
    assert check_messages(found.messages, 0, count) == count


def test_a_store_that_gives_other_messages_is_found_out(bare_store):
    store.xrange(bare_store, 3, 200)
    store.lrange(bare_store, 3, 200)
    first, second, _ = lines_of(3, 200)
    bare_store.ask("LSET", "given:l:200", 1, first)
    bare_store.ask("XDEL", "given:x:200", "3-1")
    bare_store.ask("XADD", "given:x:200", "4-1", "b", second)
    for give in (store.xrange, store.lrange):
        with pytest.raises(Lost):
            give(bare_store, 3, 200)


def test_an_error_of_the_store_is_no_answer(bare_store):
    with pytest.raises(Lost, match="unknown command"):
        bare_store.ask("XYZ")
    bare_store.ask("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(Lost, match="OOM"):
        store.xadd(bare_store, 1, 10, 200)


# The peers


@pytest.fixture(params=PEERS)
def peer(request, tmp_path):
    where = PEERS[request.param]
    try:
        opener = getattr(importlib.import_module(f"benchmarks.peers.{where.module}"), where.opener)
        with opener(tmp_path) as peer:
            yield request.param, peer
    except (Missing, ImportError) as error:
        pytest.skip(f"{request.param}: {error}")


def test_a_peer_gives_all_that_it_keeps_or_is_found_out(peer):
    name, peer = peer
    peer.fill(40, 200)
    if name.startswith("TypeScript"):  # it cannot tell the events of one millisecond apart
        with pytest.raises(Lost):
            check_messages(peer.readers["raw client"](200).messages, peer.skipped, 40)
        return
    for replay in [*peer.readers.values()] * 2:
        found = replay(200)
        assert found.took_s > 0
        assert check_messages(found.messages, peer.skipped, 40) == 40 - peer.skipped


def test_what_is_not_installed_says_what_brings_it():
    with pytest.raises(Missing, match="no such-server here; it comes with such"):
        executable("such-server", "such")
    with pytest.raises(Missing, match="make bench-peers"):
        node_module("such-module")


# The report


def row_of(name, size, median, unit="messages/s", **more):
    return Row(name, size, "ours", unit, [median], median, **more)


def results_of(*rows, suite="resume"):
    return Results(Plan(), MACHINE, [Measured(suite, "Coming back", 1, rows)])


def test_a_goal_is_held_against_the_medians():
    goal = Goal("what", "resume", "a", "b", 200, 0.5)
    results = results_of(row_of("a", 200, 30.0), row_of("b", 200, 50.0))
    verdict = goals.verdict(goal, results)
    assert (verdict.reached, verdict.is_met, verdict.word) == (0.6, True, "")
    assert not goals.verdict(goal._replace(bound=0.7), results).is_met
    assert goals.verdict(goal._replace(bound=0.7, is_ceiling=True), results).is_met
    assert goals.verdict(goal._replace(of=""), results).reached == 30


def test_a_goal_that_was_not_measured_is_not_met():
    goal = Goal("what", "resume", "a", "b", 200, 0.5)
    assert goals.verdict(goal, results_of()) == Verdict(goal, word=goals.NOT_MEASURED)
    failed = row_of("b", 200, 0.0, failed="loses or reorders")
    verdict = goals.verdict(goal, results_of(row_of("a", 200, 30.0), failed))
    assert (verdict.word, verdict.is_met) == ("loses or reorders", False)


def test_a_run_of_one_suite_leaves_the_results_of_the_others():
    first = results_of(row_of("a", 200, 1.0))
    both = results_of(row_of("b", 200, 2.0), suite="live").beside(first)
    assert [measured.name for measured in both.suites] == ["resume", "live"]
    again = results_of(row_of("a", 200, 3.0)).beside(both)
    assert sorted((each.name, each.rows[0].median) for each in again.suites) == [
        ("live", 2.0),
        ("resume", 3.0),
    ]
    longer = Results(Plan(rounds=9), MACHINE, first.suites)
    assert len(results_of(row_of("b", 200, 2.0), suite="live").beside(longer).suites) == 2
    elsewhere = Results(Plan(), {"cpus": "64"}, first.suites)
    assert results_of(row_of("b", 200, 2.0), suite="live").beside(elsewhere).suites != both.suites


def test_every_goal_is_of_rows_that_are_measured():
    results = publish.load(publish.PUBLISHED)
    assert {verdict.word for verdict in goals.verdicts(results)} <= {""}


def test_the_pages_say_what_the_published_results_say():
    for path, text in publish.made(publish.load(publish.PUBLISHED)).items():
        assert path.read_text() == text, f"{path.name}: python -m benchmarks --publish writes it"


def test_the_page_on_performance_has_the_published_figures():
    results = publish.load(publish.PUBLISHED)
    page = (ROOT / "docs" / "inside" / "performance.md").read_text()
    table = page.partition("| goal | reached |\n|---|---|\n")[2].partition("\n\n")[0]
    last = " ".join(row.rpartition(" | ")[2] for row in table.splitlines())
    missed = [each.reached for each in goals.verdicts(results) if not each.is_met]
    assert re.findall(r"\d[\d.]*", last) == [report.short(reached) for reached in missed]

    text = " ".join(page.partition("## The cost of a short call")[2].split())
    cells = (
        *(calls.ours(each, calls.DURABLE) for each in (calls.HTTP, calls.WEBSOCKET, calls.STDIO)),
        calls.BARE,
    )
    for cell in cells:
        row = results.row("calls", calls.row(cell, 32, calls.CPU), 0)
        assert re.search(rf"\b{re.escape(report.short(row.median))}\b", text), cell


def test_a_row_without_a_figure_is_shown_by_its_word():
    failed = row_of("peer", 200, 0.0, failed="missing", detail="not installed")
    results = results_of(row_of("ours", 200, 10.0), failed)
    text = report.markdown(results, {})
    assert "| peer | 200 B | missing |  |  |  |" in text
    assert "peer: not installed" in text
    assert "missing" in report.charts(results)["resume"]


def test_rows_with_columns_are_one_line_and_the_first_column_is_charted():
    rows = [
        row_of("limit: a: calls/s", 0, 2000.0, unit="calls/s"),
        row_of("limit: a: p50", 0, 1.5, unit="ms"),
        row_of("b: calls/s", 0, 0.0, unit="calls/s", failed="missing", detail="not installed"),
    ]
    measured = Measured("calls", "Calls", 1, rows, ["calls/s", "p50"])
    results = Results(Plan(), MACHINE, [measured])
    text = report.markdown(results, {})
    for shown in ("| | calls/s | p50, ms |", "| limit: a | 2k | 1.5 |", "| b | missing |  |"):
        assert shown in text
    assert "not installed" in text
    picture = report.charts(results)["calls"]
    assert "limit: a<" in picture
    assert "p50" not in picture


@pytest.mark.parametrize(
    ("serve", "way"), [(http_server, reconnect.EVENTS), (websocket_server, reconnect.SOCKETS)]
)
async def test_clients_that_come_back_miss_nothing_unseen(tmp_path, serve, way):
    plan = reconnect.Plan(clients=2, count=50)
    with trio.fail_after(PATIENCE_S):
        async with serve(f"{FAULTY}:lossy", tmp_path / "journal.db") as served:
            crowd = await way.gather(served.url, plan)
            with pytest.raises(Lost):
                await way.come_back(crowd, plan)


async def test_what_gives_several_rows_is_run_once_a_round():
    runs = []

    async def run():
        runs.append(len(runs))
        return len(runs)

    batch = harness.Batch(run)
    first, second = batch.figure(lambda n: n * 10), batch.figure(lambda n: n * 100)
    assert [await first(), await second(), await second(), await first()] == [10, 100, 200, 20]


def events_of(count):
    lines = [notification(METHOD, params(FIRST + n, "")).strip() for n in range(count)]
    lines.append(b'{"jsonrpc":"2.0","id":1,"result":{}}')
    return [Event(b"key_%d" % seq, line) for seq, line in enumerate(lines, 1)]


def checked(events, check):
    check.take(events)
    return check.end()


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_events_come_whole_wherever_they_are_cut(newline):
    sent = [Event(b"key_0", b""), Event(b"", b"{}"), *events_of(2)]
    lines = [b"retry: 0"]
    for event in sent:
        lines += [b"id: " + event.id] * bool(event.id) + [b"data: " + event.data, b""]
    body = newline.join([*lines, b""])
    for size in (1, 2, 7, len(body)):
        parser = EventParser()
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        assert [event for piece in pieces for event in parser.feed(piece)] == sent


def test_what_follows_an_event_is_counted_to_the_result():
    ahead = [Event(b"key_1", b""), Event(b"", b"{}")]
    assert checked([*ahead, *events_of(3)[1:]], Check(b"key_1", 3)) == 3


@pytest.mark.parametrize(
    "spoil",
    [
        lambda events: events[:1] + events[2:],
        lambda events: events[:2] + events[1:],
        lambda events: [events[1], events[0], *events[2:]],
        lambda events: [Event(events[0].id, events[1].data), *events[1:]],
        lambda events: [Event(b"other_1", events[0].data), *events[1:]],
        lambda events: events[:-1],
        lambda events: [*events[:-1], Event(events[-1].id, b'{"id":1,"error":{}}')],
        lambda events: [*events[:-1], Event(events[-1].id, b'{"result":{"isError":true}}')],
    ],
)
def test_events_that_are_not_all_that_follows_are_found_out(spoil):
    with pytest.raises(Lost):
        checked(spoil(events_of(3)), Check(b"key_0", 3))


@pytest.mark.parametrize("size", [120, 200, 4096])
def test_every_message_has_the_size_that_it_is_said_to_have(size):
    text = text_for(size)
    lines = [notification(METHOD, params(FIRST + number, text)) for number in (0, 9, 999_999_999)]
    assert [len(line) for line in lines] == [size] * 3


def test_a_size_that_no_message_can_have_is_refused():
    with pytest.raises(ValueError, match="at least"):
        text_for(50)


@pytest.mark.parametrize("kind", raw.LIMITS)
def test_a_limit_is_a_rate(kind):
    assert raw.LIMITS[kind](2 * 1024 * 1024) > 0


def test_longer_bars_are_larger_values_and_words_are_escaped():
    bars = [Bar("a < b", 10.0, "ours"), Bar("more", 1000.0, "limit")]
    picture = ElementTree.fromstring(bar_chart("T & t", "s", {"group": bars}))
    widths = [
        float(r.get("width", "")) for r in picture.iter(f"{SVG}rect") if r.get("class") != "bg"
    ]
    assert widths[0] < widths[1]
    assert "a < b" in [text.text for text in picture.iter(f"{SVG}text")]


def test_copied_streams_are_found_as_those_that_the_journal_has_written(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    idle.write(path, 5, 3)
    keyring = Keyring.load(key_path(path))
    with closing(SQLiteStore(path)) as store:
        assert store.claim() == []
        assert store.lookups.totals() == Totals(last_number=5, evicted=5)
        written, *copies = store.lookups.listed(idle.PRINCIPAL, after=0, limit=9)
        assert [each.number for each in copies] == [2, 3, 4, 5]
        for each in copies:
            assert replace(each, stream=written.stream, number=1) == written
            [name] = keyring.names(each.stream)
            assert store.lookups.named(name) == each.stream
            found = store.read(each.stream, 0, bytes_max=10_000)
            assert found == store.read(written.stream, 0, bytes_max=10_000) != []
    assert not inspect(path).problems


def test_many_idle_streams_are_all_there(tmp_path: Path) -> None:
    plan = scale.Plan(streams=40, messages=120, few=4, polls=10)
    results = scale.measure(plan, scale.prepare(plan, tmp_path))
    assert [(f.streams, f.messages) for f in results.figures] == [(4, 12), (40, 120)]
    assert all(f.restart_s > 0 and f.resident_bytes > 0 for f in results.figures)
    grown = results.figures[1].resident_bytes - results.figures[0].resident_bytes
    assert results.stream_bytes == grown / 36
