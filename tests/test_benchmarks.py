"""The benchmarks work, and measure nothing that is not complete and in order."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import trio

from benchmarks import measure, raw, reconnect, report, scale
from benchmarks.__main__ import main
from benchmarks.chart import Bar, bar_chart
from benchmarks.events import Check, Event, EventParser
from benchmarks.measure import LIMIT_OF, SERVERS, Plan
from benchmarks.numbered import FIRST, METHOD, Lost, check, params, text_for
from streams import Client
from streams.messages import notification

FAULTY = Path(__file__).with_name("faulty_fill.py")
SVG = "{http://www.w3.org/2000/svg}"
PATIENCE_S = 100


def test_a_quick_run_measures_everything_and_writes_it_down(tmp_path, capsys):
    main(["--quick", "--out", str(tmp_path)])

    results = json.loads((tmp_path / "latest.json").read_bytes())
    assert {path.name for path in tmp_path.iterdir()} == {"latest.json", "latest.svg"}
    figures = results["figures"]
    found = {tuple(figure["case"].values()) for figure in figures}
    assert found == {(c.what, c.transport, c.journal, c.size) for c in measure.cases(measure.QUICK)}
    for figure in figures:
        limit = results["limits"][LIMIT_OF[figure["case"]["transport"]]] / figure["case"]["size"]
        assert figure["ratio"] == pytest.approx(figure["median"] / limit)
        assert 0 < figure["ratio"] < 1
    picture = ElementTree.parse(tmp_path / "latest.svg").getroot()
    bars = [bar.get("class") for bar in picture.iter(f"{SVG}rect")]
    assert len(bars) - bars.count("bg") == len(figures) + bars.count("limit")
    assert "WebSocket" in capsys.readouterr().out


@pytest.mark.parametrize("mistake", ["lossy", "twisted", "curt"])
@pytest.mark.parametrize("transport", SERVERS)
async def test_a_server_that_loses_or_reorders_is_found_out(tmp_path, transport, mistake):
    server = SERVERS[transport](f"{FAULTY}:{mistake}", tmp_path / "journal.db")
    plan = Plan(counts={200: 50})
    cases = [case for case in measure.cases(plan) if case.transport == transport]
    with trio.fail_after(PATIENCE_S):
        async with server as served:
            for case in cases:
                if case.journal == "file":
                    with pytest.raises(Lost):
                        await measure.once(case, served, plan)


async def test_a_run_ends_with_the_first_message_that_is_lost(tmp_path):
    plan = Plan(rounds=1, counts={200: 50}, limit_bytes=1024 * 1024)
    with trio.fail_after(PATIENCE_S), pytest.raises(Lost, match="message 25 was expected"):
        await measure.run(plan, tmp_path, machine={}, app=f"{FAULTY}:lossy")


async def test_a_message_too_many_at_the_start_is_found_out(tmp_path):
    with trio.fail_after(PATIENCE_S):
        async with (
            SERVERS["websocket"](measure.APP, None) as served,
            Client(served.dialer) as client,
            client.call("fill", {"count": 3, "size": 200}) as call,
        ):
            with pytest.raises(Lost):
                await check(call, 3, after=1)


def test_both_servers_are_measured_with_clients_that_come_back_at_once(tmp_path, capsys):
    main(["reconnect", "--quick", "--rounds", "2", "--out", str(tmp_path)])

    assert [path.name for path in tmp_path.iterdir()] == ["reconnect.json"]
    results = json.loads((tmp_path / "reconnect.json").read_bytes())
    assert [figure["server"] for figure in results["figures"]] == list(reconnect.WAYS)
    assert all(rate > 0 for figure in results["figures"] for rate in figure["rates"])
    assert {len(figure["rates"]) for figure in results["figures"]} == {2}
    ours, websocket, stock = (figure["median"] for figure in results["figures"])
    assert results["ratio"] == pytest.approx(ours / stock)
    assert results["websocket_ratio"] == pytest.approx(websocket / stock)
    shown = f"ratio: {results['ratio']:.1f}, WebSocket {results['websocket_ratio']:.1f}"
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    ("transport", "way"), [("http", reconnect.EVENTS), ("websocket", reconnect.SOCKETS)]
)
async def test_clients_that_come_back_miss_nothing_unseen(tmp_path, transport, way):
    plan = reconnect.Plan(clients=2, count=50)
    with trio.fail_after(PATIENCE_S):
        async with SERVERS[transport](f"{FAULTY}:lossy", tmp_path / "journal.db") as served:
            crowd = await way.gather(served.url, plan)
            with pytest.raises(Lost):
                await way.come_back(crowd, plan)


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


def test_the_table_names_the_limit_that_each_figure_is_held_against(capsys):
    case = measure.Case("resume", "stdio", "file", 200)
    figure = measure.Figure(case, [10.0, 30.0, 20.0], 20.0, 200.0, 0.1)
    results = measure.Results(Plan(rounds=3), {"cpus": "2"}, {"pipe": 40_000.0}, [figure])
    report.show(results, report.Console(width=80))
    row = next(line for line in capsys.readouterr().out.splitlines() if "resume" in line)
    assert row.split() == [
        "resume",
        "200",
        "B",
        "stdio",
        "SQLite",
        "20",
        "10-30",
        "pipe",
        "200",
        "0.100",
    ]


def test_many_idle_streams_are_all_there(tmp_path: Path) -> None:
    plan = scale.Plan(streams=40, messages=120, few=4, polls=10)
    results = scale.run(plan, tmp_path)
    assert [(f.streams, f.messages) for f in results.figures] == [(4, 12), (40, 120)]
    assert all(f.restart_s > 0 and f.resident_bytes > 0 for f in results.figures)
    grown = results.figures[1].resident_bytes - results.figures[0].resident_bytes
    assert results.stream_bytes == grown / 36
