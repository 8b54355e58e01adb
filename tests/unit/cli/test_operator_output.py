"""The operator's commands print tables in narrow windows, gaps, limits, and restarts."""

import io
import json
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from streams.cli.actions import operators, sources
from streams.cli.actions.admin_client import AdminClient, CannotAsk
from streams.cli.operator_options import Output
from streams.clock import wall
from streams.observe.details import CallDetail, MessagesFound
from streams.observe.lines import view
from streams.observe.registry import CallView, OpenQuestion, Page, State, Wanted

ANONYMOUS = "session(5db3ea08a4f34f6f9d0a5db3ea08a4f34f6f9d0a5db3ea08a4f34f6f9d0a12)"
RESULT = b'{"jsonrpc":"2.0","id":1,"result":{}}\n'
AT_ONCE = Output(every=0)


def a_call(*, state: State = "running", last: int = 0, number: int = 1) -> CallDetail:
    return CallDetail(
        id="WCVxksN6abcd",
        number=number,
        tool="compile_the_whole_thing1",
        principal=ANONYMOUS,
        state=state,
        began_at=wall() - 3599,
        ended_at=None,
        numbered=last,
        durable=last,
        handed=last,
        written=None,
        delivered=last,
        pending=0,
        pending_bytes=None,
        transport="websocket",
        is_in_memory=True,
        missed={},
        uncounted=0,
    )


class Scripted:
    """A place whose answers are written down; an exception is raised."""

    name = "scripted"
    client: AdminClient | None = None
    path: Path | None = None

    def __init__(
        self,
        calls: Sequence[CallDetail | Exception],
        messages: Sequence[MessagesFound | Exception] = (),
    ) -> None:
        self._calls, self._messages = list(calls), list(messages)

    def held(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def calls(self, before: int | None, limit: int, wanted: Wanted) -> Page:
        found: list[CallView] = [a_call(number=number) for number in range(60, 0, -1)]
        found = [each for each in found if before is None or each.number < before]
        return Page(tuple(found[:limit]), found[limit - 1].number if len(found) > limit else None)

    async def call(self, prefix: str) -> CallDetail:
        found = self._calls.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def messages(self, prefix: str, after: int, limit: int) -> MessagesFound:
        found = self._messages.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


def found(*seqs: int, gone: int = 0, after: int | None = None) -> MessagesFound:
    return MessagesFound(tuple(view(seq, RESULT) for seq in seqs), after, gone)


async def tailed(source: sources.Source, output: Output = AT_ONCE, lines: int = 0) -> int:
    return await operators._tail_call(source, prefix="WCV", lines=lines, output=output)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_principal_gives_way_in_a_narrow_window(columns: int) -> None:
    out = io.StringIO()
    calls = (a_call(state="completed"), a_call(state="abandoned"))
    console = Console(file=out, width=columns, force_terminal=True, color_system=None)
    console.print(operators.table_of(Page(calls, None)))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    for call, line in zip(calls, lines[1:], strict=True):
        for cell in (call.id, call.tool, call.state, "59m 59s", "websocket"):
            assert cell in line
        assert ("session(5db3ea08..." in line) == (columns == 120)


@pytest.mark.parametrize(
    ("params", "shown"),
    [
        (b'{"message":"Which?","requestedSchema":{"maximum":1e400}}', "Which?"),
        (b'{"maxTokens":1e400}', '{"maxTokens":1e400}'),
    ],
)
def test_a_question_is_shown_whatever_its_numbers(params: bytes, shown: str) -> None:
    question = OpenQuestion("a", 1, "elicitation/create", msgspec.Raw(params))
    call = msgspec.structs.replace(a_call(state="asking"), questions=(question,))
    out = io.StringIO()
    Console(file=out, width=200).print(operators.card_of(call))
    assert f"elicitation/create {shown}" in out.getvalue()


async def test_a_list_tells_that_there_is_more() -> None:
    page = await operators.calls_of(Scripted([]), Wanted(), 50)
    assert (len(page.calls), page.before) == (50, 11)
    assert "more: --limit 100" in operators._more(page)
    assert (await operators.calls_of(Scripted([]), Wanted(), 60)).before is None
    assert "--limit" not in operators._more(Page(page.calls * 20, 1))


def test_a_call_is_not_abandoned_after_its_end() -> None:
    def client(call: CallDetail) -> str:
        given = msgspec.structs.replace(call, expires_at=wall() + 7200, transport="")
        return operators._client(given, wall())

    assert "is abandoned in" in client(a_call())
    for state in ("cancelled", "abandoned"):
        assert client(a_call(state=state)).startswith("none; the call is remembered for")


async def test_a_tail_names_what_is_not_kept_any_more(capsys: pytest.CaptureFixture[str]) -> None:
    ended = a_call(state="completed", last=110)
    source = Scripted([a_call(last=104), ended], [found(), found(110, gone=109)])
    assert await tailed(source) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "105 to 109: delivered, not kept any more"
    assert out.splitlines()[1].split()[:2] == ["110", "result"]
    assert "The call is completed" in err


async def test_a_tail_tells_the_end_of_a_call_whose_result_is_gone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = Scripted([a_call(last=2), a_call(state="failed", last=3)], [found(), found(gone=3)])
    assert await tailed(source, Output(every=0, json=True)) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"missing": {"from": 3, "to": 3}}
    assert "The call is failed" in err


async def test_a_tail_goes_on_when_the_server_answers_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    away = CannotAsk("http://x cannot be asked: refused.")
    source = Scripted(
        [a_call(), away, away, a_call(state="stopped"), a_call(state="completed", last=1)],
        [found(), away, found(), found(1)],
    )
    assert await tailed(source) == 0
    out, err = capsys.readouterr()
    assert out.split()[:2] == ["1", "result"]
    assert err.count("Looking again until Ctrl-C") == 2
    assert err.count("answers again") == 2
    assert "waiting for the next one" in err


async def test_a_server_that_never_answered_is_an_error_at_once() -> None:
    with pytest.raises(CannotAsk, match="refused"):
        await tailed(Scripted([CannotAsk("refused")]))


def test_a_servers_readiness_is_told_in_words() -> None:
    ready, unready = (
        operators.counts_of({"unready": reason, "running": 1}) for reason in ("", "starting")
    )
    assert isinstance(ready, operators._Rows)
    assert isinstance(unready, operators._Rows)
    assert ready.rows[0] == ["ready", "yes"]
    assert unready.rows[0] == ["ready", "no: starting"]
