"""Exceptions of tools: the text for the client, and the entry in the log."""

from typing import Any

import msgspec
import pytest
import structlog
import trio

from streams import Call, Server, SyncCall, ToolError
from streams.faults import TOLD_MAX
from tests.rigs.server import run, text_of

Logs = list[Any]


async def failing(
    error: BaseException, *, mask_errors: bool = False, waits: bool = False
) -> tuple[str, Logs]:
    """The text that a client gets of a tool that raises this, and the log.

    Only a tool that `waits` has a task of its own.
    """
    server = Server("tested", mask_errors=mask_errors)

    @server.tool
    async def fail() -> str:
        raise error

    @server.tool
    async def wait_and_fail() -> str:
        await trio.lowlevel.checkpoint()
        raise error

    with structlog.testing.capture_logs() as logs:
        final = (await run(server, "wait_and_fail" if waits else "fail"))[-1]
    assert final["result"]["isError"]
    return text_of(final), logs


def tracebacks(logs: Logs) -> Logs:
    return [entry for entry in logs if "exc_info" in entry]


@pytest.mark.parametrize("mask_errors", [False, True])
async def test_the_text_of_a_tool_error_reaches_the_client_as_it_stands(mask_errors: bool) -> None:
    text, logs = await failing(ToolError("No such order: A-1."), mask_errors=mask_errors)
    assert text == "No such order: A-1."
    assert not tracebacks(logs), "an error that the author expects needs no traceback"
    (entry,) = [each for each in logs if each["event"] == "a tool reports an error"]
    assert (entry["log_level"], entry["tool"]) == ("info", "fail")


async def test_a_subclass_of_a_tool_error_is_one() -> None:
    class NotFound(ToolError):
        pass

    assert (await failing(NotFound("gone"), mask_errors=True))[0] == "gone"


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(
    "error", [ValueError("dsn=secret"), KeyError("secret"), SystemExit("secret")]
)
async def test_another_exception_is_masked_on_request(error: BaseException, waits: bool) -> None:
    text, logs = await failing(error, mask_errors=True, waits=waits)
    (entry,) = tracebacks(logs)
    assert entry["event"] == "a tool failed"
    assert "secret" not in text
    assert entry["id"] in text
    assert entry["exc_info"][1] is error
    assert "secret" in (await failing(error, waits=waits))[0], "not masked by default"


async def test_a_result_that_breaks_its_schema_is_masked_too() -> None:
    server = Server("tested", mask_errors=True)

    @server.tool(output_schema={"type": "object", "required": ["secret"]})
    async def fail() -> dict[str, int]:
        return {}

    assert "secret" not in text_of((await run(server, "fail"))[-1])


async def test_bad_arguments_are_told_though_errors_are_masked() -> None:
    server = Server("tested", mask_errors=True)

    @server.tool
    async def build(rows: int) -> str:
        raise AssertionError(rows)

    assert "rows" in text_of((await run(server, "build", rows="many"))[-1])


async def test_an_error_of_the_authors_types_is_masked() -> None:
    class Rows(msgspec.Struct):
        count: int

        def __post_init__(self) -> None:
            raise RuntimeError("dsn=secret")

    told = []
    for mask_errors in (False, True):
        server = Server("tested", mask_errors=mask_errors)

        @server.tool
        async def build(rows: Rows) -> str:
            raise AssertionError(rows)

        told.append(text_of((await run(server, "build", rows={"count": 1}))[-1]))
    assert ["secret" in text for text in told] == [True, False]


def grouped(*errors: BaseException, depth: int = 1) -> BaseException:
    group = BaseExceptionGroup("jobs", errors)
    for _ in range(depth - 1):
        group = BaseExceptionGroup("jobs", [group])
    return group


@pytest.mark.parametrize("depth", [1, 2, 50])
async def test_a_group_of_one_error_is_told_as_this_error(depth: int) -> None:
    assert (await failing(grouped(ValueError("no rows"), depth=depth)))[0] == "no rows"
    told, logs = await failing(grouped(ToolError("no rows"), depth=depth), mask_errors=True)
    assert (told, tracebacks(logs)) == ("no rows", [])


async def test_a_group_of_several_names_each_of_them() -> None:
    group = grouped(
        ValueError("no rows"), grouped(KeyError("id"), ToolError("Closed today.")), RuntimeError()
    )
    text, logs = await failing(group)
    assert text == "4 errors: ValueError: no rows; KeyError: 'id'; Closed today.; RuntimeError"
    assert len(tracebacks(logs)) == 1
    text, logs = await failing(group, mask_errors=True)
    assert text.startswith("Closed today.; fail failed: ")
    assert "rows" not in text
    assert len(tracebacks(logs)) == 1


async def test_a_large_group_is_told_in_part() -> None:
    text, _ = await failing(grouped(*(ValueError(f"row {n}") for n in range(TOLD_MAX + 5))))
    assert text.startswith(f"{TOLD_MAX + 5} errors: ValueError: row 0; ")
    assert text.endswith(f"row {TOLD_MAX - 1}; and 5 more")


async def test_an_error_in_a_nursery_is_told_as_it_is() -> None:
    server = Server("tested")

    async def job(call: Call) -> None:
        await call.log("info", "begun")
        raise ValueError("no rows")

    @server.tool
    async def fail(call: Call) -> str:
        async with trio.open_nursery() as outer, trio.open_nursery() as inner:
            inner.start_soon(job, call)
            outer.start_soon(trio.sleep_forever)
            await trio.sleep_forever()
        return "never"

    assert text_of((await run(server, "fail"))[-1]) == "no rows"


@pytest.mark.parametrize("is_async", [False, True])
async def test_pages_and_plain_functions_fail_in_the_same_words(is_async: bool) -> None:
    server = Server("tested", mask_errors=True)

    def fail(call: SyncCall, why: str) -> Any:
        raise ToolError("Closed today.") if why == "told" else ValueError("secret")

    def pages(call: SyncCall, why: str) -> Any:
        yield fail(call, why)

    async def async_pages(call: Call, why: str) -> Any:
        yield fail(call, why)  # type: ignore[arg-type]

    server.tool(fail)
    server.tool(name="pages", pages=True)(async_pages if is_async else pages)
    for tool in ("fail", "pages"):
        assert text_of((await run(server, tool, why="told"))[-1]) == "Closed today."
        assert text_of((await run(server, tool, why="other"))[-1]).startswith(f"{tool} failed: ")
