"""The operator's page in a real Chromium, over real servers.

The pictures that it takes are kept in `.pictures`, to be looked at.
"""

import contextlib
import http.client
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from streams.clock import lasting
from tests.rigs import ROOT
from tests.rigs.browser import DESKTOP, PHONE, Tab, browsing
from tests.wire.process import ServerProcess, kept_port
from tests.wire.raw import DEADLINE_S, Peer, method_is
from tests.wire.verbs import POSITIONS, Started, ack, start

APP: Final = f"{ROOT / 'tests/rigs/operated.py'}:server"
PICTURES: Final = ROOT / ".pictures"
TOKEN: Final = "operator-token-0123456789"
# Each event is seen within a second. A busy machine may take longer: `SEEN_S=1` is the claim.
SEEN_S: Final = float(os.environ.get("SEEN_S", "10"))
SIZES: Final = {"desktop": DESKTOP, "phone": PHONE}
_URL: Final = re.compile(r"http://127\.0\.0\.1:(\d+)/health/ready")
HOSTILE: Final = "<img src=x onerror=hacked=1><script>hacked=1</script>\u202e\x1b[2J\u2066</td>"

pytestmark = pytest.mark.needs_one_process("the page shows one process")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browsing(tmp_path_factory.mktemp("browser") / "profile") as tab:
        yield tab


Serve = Callable[..., ServerProcess]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    servers: list[ServerProcess] = []
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)

    def serve(*options: str) -> ServerProcess:
        where = ("--admin", "127.0.0.1:0", "--admin-token-file", str(token))
        servers.append(ServerProcess(tmp_path, app=APP, options=(*where, *options)).start())
        return servers[-1]

    yield serve
    for server in servers:
        server.__exit__()


@pytest.fixture(autouse=True)
def no_complaints(tab: Tab, serve: Serve) -> Iterator[None]:
    """No error of a script, no violation of the policy, and no request to anywhere else."""
    tab.do("Network.clearBrowserCookies")
    tab.run("1")
    tab.complaints.clear()
    tab.asked.clear()
    tab.expected = ()
    yield
    tab.run("1")
    expected = ("status of 401", *tab.expected)
    ours = [each for each in tab.complaints if not any(words in each for words in expected)]
    assert ours == []
    tab.open("about:blank")  # before the server ends
    assert {each.split("/")[2].split(":")[0] for each in tab.asked if "//" in each} <= {"127.0.0.1"}


def place_of(server: ServerProcess) -> str:
    server.hear("/health/ready")
    found = [match[1] for match in map(_URL.search, server.log) if match]
    return f"http://127.0.0.1:{found[-1]}"


def signed_in(tab: Tab, server: ServerProcess, path: str = "/") -> str:
    """Sign in, and open a page; returns the address of the server."""
    url = place_of(server)
    tab.resize(DESKTOP)
    tab.open(f"{url}/")
    tab.fill("#token", TOKEN)
    tab.click("button.first")
    if path != "/":
        tab.open(f"{url}{path}")
    tab.wait_for(IS_LIVE)
    return url


IS_LIVE: Final = "document.querySelector('#connection')?.dataset.state === 'live'"


def row(call: Started) -> str:
    return f"document.querySelector('#call-{call.stream[:12]}')"


def says(where: str, words: str) -> str:
    return f"{where}?.innerText.includes({json.dumps(words)})"


def peer_of(server: ServerProcess, kind: str = "ws-streams") -> Peer:
    peer = server.connect(kind)
    peer.initialize(POSITIONS)
    return peer


# Complaints of a browser about a server that is gone, and about one that starts.
# While the next server starts, it answers with 503.
LOST: Final = ("net::ERR_", "[object Event]", "status of 404", "status of 503")


class Seen:
    """How long it took until each thing was seen."""

    def __init__(self, tab: Tab) -> None:
        self.took: dict[str, float] = {}
        self._tab = tab

    def see(self, what: str, script: str) -> None:
        self.took[what] = round(self._tab.wait_for(script, SEEN_S), 3)


def test_each_event_of_a_call_is_seen_within_a_second(
    tab: Tab, serve: Serve, record_property: Callable[[str, object], None]
) -> None:
    server = serve("--admin-write")
    signed_in(tab, server)
    seen = Seen(tab)
    with peer_of(server) as peer:
        call = start(peer, "order")
        seen.see("started", says(row(call), "order"))
        seen.see("asked", says(row(call), "elicitation/create"))
        seen.see("attached", says(row(call), "websocket"))
    seen.see("cut", f"{row(call)}?.querySelector('.state.detached')")
    with peer_of(server) as peer:
        resumed = peer.request("stream/resume", call.with_token)
        seen.see("resumed", f"{row(call)}?.querySelector('.state.attached')")
        tab.click(f"#link-{call.stream[:12]}")
        tab.wait_for(IS_LIVE)
        moments = "document.querySelector('#moments')"
        for what in ("asked", "cut", "resumed"):
            assert tab.run(says(moments, what)), what
        assert tab.run("document.querySelectorAll('.rule').length") >= 3
        tab.fill("input[name='field name']", "Costs & <b>profits</b>")
        tab.fill("input[name='field rows']", "12")
        tab.click("button.first")
        told = peer.response(call.id).result["content"][0]["text"]
        assert "'name': 'Costs & <b>profits</b>', 'rows': 12, 'draft': True" in told
        peer.response(resumed)
        tab.wait_for(IS_LIVE)
        seen.see("answered", says(moments, "answered"))
        seen.see("ended", says("document.querySelector('#facts')", "completed"))
    tab.open(f"{place_of(server)}/")
    tab.wait_for(IS_LIVE)
    with peer_of(server) as peer:
        running = start(peer, "build", n=3)
        seen.see("running", says(row(running), "running"))
        tab.expected = LOST
        server.kill()
        seen.see("killed", "document.querySelector('#connection').dataset.state === 'lost'")
        tab.photograph(PICTURES / "lost.png")
    record_property("seen", seen.took)
    print("seen after s:", seen.took)


def test_what_an_operator_writes_outlives_updates(tab: Tab, serve: Serve) -> None:
    server = serve("--admin-write")
    url = signed_in(tab, server)
    with peer_of(server) as peer:
        call = start(peer, "orders")
        tab.open(f"{url}/calls/{call.stream[:12]}")
        tab.wait_for("document.querySelectorAll('.question').length === 2")
        asked = [peer.expect(method_is("elicitation/create")) for _ in range(2)]
        first = next(each for each in asked if "first" in each.params["message"])
        mine = "[...document.querySelectorAll('.question')].find(q => /second/.test(q.innerText))"
        name = f"{mine}.querySelector(\"input[name='field name']\")"
        tab.run(f"{name}.focus(); {name}.value = 'Costs'")
        peer.answer(first["id"], {"action": "decline"})
        tab.wait_for("document.querySelectorAll('.question').length === 1")
        assert tab.run(f"{name}.value") == "Costs"
        assert tab.run(f"document.activeElement === {name}")
        tab.click("button.first")
        assert "'name': 'Costs'" in peer.response(call.id).result["content"][0]["text"]


def test_a_browser_comes_back_to_a_server_that_was_killed(tab: Tab, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    options = ("--admin", f"127.0.0.1:{kept_port()}", "--admin-token-file", str(token))
    with ServerProcess(tmp_path, app=APP, options=options) as server:
        signed_in(tab, server)
        with peer_of(server) as peer:
            lost = start(peer, "build", n=3)
            kept = start(peer, "resumed")
            tab.wait_for(says(row(kept), "running"))
            tab.expected = LOST
            server.kill()
            tab.wait_for("document.querySelector('#connection').dataset.state === 'lost'")
        server.start()
        tab.wait_for(IS_LIVE)
        tab.wait_for(f"{row(lost)}?.querySelector('.state.failed')")
        tab.click(f"#link-{kept.stream[:12]}")
        tab.wait_for(says("document.querySelector('#moments')", "restarted"))


INJECTED: Final = """
const script = document.createElement('script');
script.textContent = 'hacked = 1';
document.body.append(script);
"""


def test_nothing_of_a_message_is_markup(tab: Tab, serve: Serve) -> None:
    server = serve("--admin-write")
    url = signed_in(tab, server)
    with peer_of(server) as peer:
        call = start(peer, "repeat", text=HOSTILE)
        long = start(peer, "repeat", text=f"{HOSTILE}x", times=14_000)  # 1 MB in one line
        tab.wait_for(says(row(long), "asking"))
        for each in (call, long):
            tab.open(f"{url}/calls/{each.stream[:12]}")
            tab.wait_for(IS_LIVE)
            tab.wait_for("document.querySelectorAll('#messages tr').length === 2")
            assert "<script>hacked=1</script>" in tab.text
            assert r"\u202e" in tab.text
            assert "\u202e" not in tab.text
        tab.photograph(PICTURES / "hostile.png", is_whole=True)
        tab.open(f"{url}/calls/{long.stream[:12]}/messages/1")
        assert "more are not shown" in tab.text
        assert "<script>hacked=1</script>" in tab.text
        assert tab.run("typeof hacked") == "undefined"
        # Even a script that got into the page would not run.
        tab.run(INJECTED)
        assert tab.run("typeof hacked") == "undefined"
        tab.wait_for("true")
        assert any("Content Security Policy" in each for each in tab.complaints)
        tab.expected = ("Content Security Policy",)
        assert tab.run("document.images.length") == 0


def test_an_operator_cuts_and_cancels(tab: Tab, serve: Serve) -> None:
    server = serve("--admin-write")
    url = signed_in(tab, server)
    with peer_of(server) as peer:
        call = start(peer, "build", n=3)
        tab.open(f"{url}/calls/{call.stream[:12]}")
        tab.wait_for("document.querySelector('#do-cut')")
        tab.click("#do-cut")
        peer.arrived()
        tab.wait_for(says("document.querySelector('#moments')", "cut"))
        tab.wait_for("!document.querySelector('#do-cut')")
    tab.run("window.confirm = () => false; document.querySelector('#do-cancel').click()")
    assert tab.run("document.querySelector('#facts .state').innerText") == "detached"
    tab.run("window.confirm = () => true")
    tab.click("#do-cancel")
    tab.wait_for(says("document.querySelector('#facts')", "cancelled"))


def test_without_leave_to_write_there_are_no_controls(tab: Tab, serve: Serve) -> None:
    server = serve()
    url = signed_in(tab, server)
    with peer_of(server) as peer:
        call = start(peer, "order")
        tab.open(f"{url}/calls/{call.stream[:12]}")
        tab.wait_for(says("document.querySelector('#questions')", "Which report"))
        assert tab.run("document.querySelectorAll('main form, main button').length") == 0
        for what in ("answer", "cut", "cancel"):
            status = tab.run(
                f"fetch('/calls/{call.stream[:12]}/{what}', {{method: 'POST', "
                "body: new URLSearchParams({form: 'x'})}).then(r => r.status)"
            )
            assert status == 403, what
        tab.wait_for(says("document.querySelector('#facts')", "asking"))
    tab.expected = ("status of 403",)


def asked(
    url: str, path: str, method: str = "GET", body: str = "", **headers: str
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE_S)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method, path, body, given)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def test_a_stranger_sees_nothing_and_changes_nothing(serve: Serve) -> None:
    server = serve("--admin-write")
    url = place_of(server)
    form = "application/x-www-form-urlencoded"
    with peer_of(server) as peer:
        call = start(peer, "order")
        path = f"/calls/{call.stream[:12]}"
        for page in ("/", path, f"{path}/messages/1"):
            status, shown, _ = asked(url, page)
            assert status == 401
            assert "order" not in shown
        for updates in ("/live", f"{path}/live"):
            assert asked(url, updates)[0] == 401
        login = asked(url, "/login", "POST", f"token={TOKEN}", content_type=form)
        cookie = login[2]["set-cookie"].partition(";")[0]
        assert asked(url, path, cookie=cookie)[0] == 200
        # A page of another port of this host has the cookie too, but another origin, and no form.
        other = {"cookie": cookie, "content_type": form, "origin": "http://127.0.0.1:1"}
        assert asked(url, f"{path}/cancel", "POST", "form=x", **other)[0] == 403
        own = {**other, "origin": url}
        assert asked(url, f"{path}/cancel", "POST", "form=x", **own)[0] == 403
        assert asked(url, "/api/drain", "POST", "", **own)[0] in (401, 404, 405)
        assert asked(url, "/", cookie=cookie, host="evil.example")[0] == 403
        assert asked(url, "/login", "POST", "token=wrong", content_type=form)[0] == 403
        assert "asking" in asked(url, path, cookie=cookie)[1]


def test_it_is_read_without_scripts(tab: Tab, serve: Serve) -> None:
    server = serve()
    url = signed_in(tab, server)
    with peer_of(server) as peer:
        call = start(peer, "build", n=120)
        tab.wait_for(says(row(call), "120"))
        tab.do("Emulation.setScriptExecutionDisabled", value=True)
        try:
            tab.open(f"{url}/?text=buil")
            assert "120" in tab.text
            tab.open(f"{url}/calls/{call.stream[:12]}?before=71")
            assert "row 70 of 120" in tab.text
            assert "row 71 of 120" not in tab.text
        finally:
            tab.do("Emulation.setScriptExecutionDisabled", value=False)


def test_it_is_used_by_keyboard(tab: Tab, serve: Serve) -> None:
    server = serve()
    signed_in(tab, server)
    with peer_of(server) as peer:
        call = start(peer, "build", n=40, every_s=0.05)
        tab.wait_for(row(call))
        for _ in range(20):
            tab.press("Tab", 9)
            if tab.run("document.activeElement.id") == f"link-{call.stream[:12]}":
                break
        # Its row is replaced while it has the focus, which must stay.
        tab.wait_for(says(row(call), "40"))
        assert tab.run("document.activeElement.id") == f"link-{call.stream[:12]}"
        tab.run("document.documentElement.dataset.old = '1'")
        tab.press("Enter", 13, "\r")
        tab.wait_for_page()
        assert tab.run("location.pathname") == f"/calls/{call.stream[:12]}"


SHIFTS: Final = """
new Promise(tell => {
  let sum = 0;
  new PerformanceObserver(list => { for (const e of list.getEntries()) sum += e.value; })
    .observe({type: 'layout-shift'});
  setTimeout(() => tell(sum), 1500);
})
"""


@pytest.mark.parametrize("size", SIZES)
def test_nothing_moves_when_values_change(size: str, tab: Tab, serve: Serve) -> None:
    server = serve()
    url = signed_in(tab, server)
    with peer_of(server) as peer:
        call = start(peer, "build", n=300, every_s=0.02)
        for path in ("/", f"/calls/{call.stream[:12]}"):
            tab.resize(SIZES[size])  # first: it moves everything
            tab.open(f"{url}{path}")
            tab.wait_for(IS_LIVE)
            if path == "/":
                tab.wait_for(row(call))
            assert tab.run(SHIFTS) < 0.01, path


# The texts that the page's script gives to these ages, while the clock stands still. The page
# counts by the server's clock: how much that differs is seen from an age of 30 s.
AGES: Final = """
(ages => {
  const real = Date.now, began = real();
  const time = document.createElement("time");
  const told = since => {
    time.dataset.since = since;
    document.dispatchEvent(new Event("htmx:sseMessage"));
    return time.textContent;
  };
  Date.now = () => began;
  document.body.append(time);
  const ahead = parseInt(told(began / 1000 - 30)) - 30;
  const found = ages.map(age => told(began / 1000 - age + ahead));
  Date.now = real;
  time.remove();
  return found;
})
"""


def test_scripts_tell_ages_as_the_server_does(tab: Tab, serve: Serve) -> None:
    """The server renders an age, the script of the page lets it grow, and `ls` shows it too."""
    signed_in(tab, serve())
    tab.wait_for(IS_LIVE)
    ages = [0, 59, 60, 200, 3600, 3630, 93_660]
    assert tab.run(f"{AGES}({ages})") == [lasting(age) for age in ages]


def fill(server: ServerProcess, count: int, stack: contextlib.ExitStack) -> None:
    """So many calls that run, ask, wait for a client, or have ended."""
    kinds = itertools.cycle(
        [("build", {"n": 30}), ("order", {}), ("finish", {"n": 5}), ("build", {"n": 3})]
    )
    peers = [
        stack.enter_context(peer_of(server, kind)) for kind in ("ws-streams", "http-sse", "ws-mcp")
    ]
    for number, (tool, arguments) in zip(range(count), kinds, strict=False):
        start(peers[number % len(peers)], tool, **arguments)
    peers[0].cut()


def photograph(tab: Tab, name: str) -> None:
    for size, pixels in SIZES.items():
        for is_dark in (False, True):
            tab.resize(pixels, is_dark=is_dark)
            scheme = "dark" if is_dark else "light"
            tab.photograph(PICTURES / f"{name}-{size}-{scheme}.png")


def test_its_pictures_with_none_and_with_twenty_calls(tab: Tab, serve: Serve) -> None:
    server = serve("--admin-write")
    url = place_of(server)
    tab.open(f"{url}/")
    photograph(tab, "login")
    signed_in(tab, server)
    assert "No calls yet" in tab.text
    photograph(tab, "calls-0")
    with contextlib.ExitStack() as stack:
        peer, reader = (stack.enter_context(peer_of(server)) for _ in range(2))
        call = start(reader, "build", n=60, every_s=0.04)
        fill(server, 20, stack)
        tab.wait_for("document.querySelectorAll('#rows tr').length === 21")
        photograph(tab, "calls-20")
        ack(reader, call.stream, 20)
        reader.cut()
        peer.settle()
        tab.open(f"{url}/calls/{call.stream[:12]}")
        tab.wait_for(says("document.querySelector('#moments')", "cut"))
        tab.wait_for(says("document.querySelector('#timeline')", "60"))
        peer.request("stream/resume", {**call.with_token, "after": 30})
        tab.wait_for(says("document.querySelector('#moments')", "resumed"))
        photograph(tab, "call")
    asking = "Array.from(document.querySelectorAll('tr')).find(r => r.innerText.includes('order'))"
    tab.open(f"{url}/")
    tab.wait_for(asking)
    tab.open(url + tab.run(f"{asking}.querySelector('a').getAttribute('href')"))
    photograph(tab, "question")


def test_ten_thousand_calls_are_shown_at_once(tab: Tab, serve: Serve) -> None:
    limits = ("streams_per_principal_max=20000", "journal_bytes_max=0")
    server = serve("--admin-write", *(f"--limit={each}" for each in limits))
    url = signed_in(tab, server)
    with peer_of(server, "ws-mcp") as peer, peer_of(server) as other:
        ids = {peer.call("build", n=1) for _ in range(10_000)}
        tab.wait_for(says("document.querySelector('#figures')", f"{len(ids):,}"), 100)
        newest = start(other, "order")
        took = {"newest": tab.wait_for(row(newest), SEEN_S)}
        tab.wait_for("document.querySelectorAll('#rows tr').length === 100")
        began_at = time.monotonic()
        tab.open(f"{url}/")
        took["opened"] = time.monotonic() - began_at
        paint = "performance.getEntriesByName('first-contentful-paint')[0]"
        tab.wait_for(paint)
        took["painted"] = tab.run(f"{paint}.startTime / 1000")
        photograph(tab, "calls-10000")
        tab.resize(DESKTOP)
        tab.wait_for(IS_LIVE)
        other.cut()
        took["cut"] = tab.wait_for(f"{row(newest)}?.querySelector('.state.detached')", SEEN_S)
        tab.open(f"{url}/?show=asking")
        tab.wait_for("document.querySelectorAll('#rows tr').length === 1")
        tab.open(f"{url}/")
        first = tab.run("document.querySelector('#rows a').id")
        tab.click("#to-older")
        assert tab.run("document.querySelectorAll('#rows tr').length") == 100
        assert tab.run("document.querySelector('#rows a').id") != first
    rounded: dict[str, Any] = {what: round(s, 3) for what, s in took.items()}
    print("10,000 calls, s:", rounded)
    assert took["painted"] < SEEN_S
