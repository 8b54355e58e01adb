"""Worker processes for checks: real processes, and how they end."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio

from streams.schemas import workers as module
from streams.schemas.workers import Workers
from tests.unit.schemas.test_validator import BRANCHING

INTEGERS = msgspec.json.encode({"items": {"type": "integer"}})
ENDLESS = msgspec.json.encode(BRANCHING)


def nested(depth: int) -> bytes:
    """Arguments that fit no branch of the schema, except at the innermost level."""
    return b'{"tree":' + b'{"of":' * depth + b'"x"' + b"}" * depth + b"}"


OTHERS: set[int] = set()  # child processes of other tests and of what they share


@pytest.fixture(autouse=True)
def others() -> None:
    OTHERS.clear()
    OTHERS.update(children())


@asynccontextmanager
async def open_workers() -> AsyncIterator[Workers]:
    workers = Workers()
    try:
        yield workers
    finally:
        await workers.aclose()
        assert children() == set()


def children() -> set[int]:
    """Child processes that this test has started, including zombies."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(folder.name))
    return found - OTHERS


async def why(workers: Workers, schema: bytes, encoded: bytes, principal: str = "a") -> str:
    with pytest.raises(ValueError, match=r"^\S") as caught:
        await workers.check(schema, encoded, "arguments", principal)
    return str(caught.value)


async def test_a_worker_serves_one_check_after_another() -> None:
    async with open_workers() as workers:
        await workers.check(INTEGERS, b"[1,2]", "arguments", "a")
        first = children()
        assert len(first) == 1
        assert await why(workers, INTEGERS, b'[1,"2"]') == '[1]: "2" is not of type "integer"'
        assert await why(workers, INTEGERS, b"[" * 100_000) == "arguments: nested too deeply"
        await workers.check(b"{}", b'{"other":"schema"}', "arguments", "a")
        assert children() == first


async def test_what_takes_too_long_to_explain_is_refused_all_the_same() -> None:
    async with open_workers() as workers:
        told = await why(workers, ENDLESS, nested(60))
        assert told == "arguments: does not fit the schema (see tools/list)"
        await workers.check(INTEGERS, b"[1]", "arguments", "a")


async def test_the_kernel_ends_a_check_that_takes_too_long() -> None:
    """Each of 100,000 values is compared with 10,000 others."""
    schema = {"items": {"enum": [{"a": number} for number in range(10_000)]}}
    encoded = b"[" + b",".join([b'{"a":9999}'] * 100_000) + b"]"
    async with open_workers() as workers:
        told = await why(workers, msgspec.json.encode(schema), encoded)
        assert told == "arguments: checking this takes too long: send less, or nest it less deeply"
        await workers.check(INTEGERS, b"[1]", "arguments", "a")


async def test_a_worker_that_was_killed_while_idle_is_replaced() -> None:
    async with open_workers() as workers:
        await workers.check(INTEGERS, b"[1]", "arguments", "a")
        (first,) = children()
        os.kill(first, signal.SIGKILL)
        await trio.to_thread.run_sync(os.waitid, os.P_PID, first, os.WEXITED | os.WNOWAIT)
        await workers.check(INTEGERS, b"[2]", "arguments", "a")
        assert first not in children()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # which threads it has
async def test_a_forked_child_does_not_hold_the_pipes_of_a_worker() -> None:
    """Otherwise a worker would outlive the server while the child runs."""
    async with open_workers() as workers:
        await workers.check(INTEGERS, b"[1]", "arguments", "a")
        (worker,) = children()
        pipes = tuple(os.readlink(f"/proc/{worker}/fd/{number}") for number in (0, 1))
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                held = {
                    os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                }
                os.write(writer, repr([pipe for pipe in held if pipe.endswith(pipes)]).encode())
            finally:
                os._exit(0)
        told = await trio.to_thread.run_sync(os.read, reader, 1000)
        await trio.to_thread.run_sync(os.waitpid, child, 0)
        os.close(reader)
        os.close(writer)
        assert told == b"[]"


async def test_a_check_that_is_cancelled_leaves_no_process() -> None:
    async with open_workers() as workers:
        with trio.move_on_after(0.2) as scope:
            await why(workers, ENDLESS, nested(60))
        if scope.cancelled_caught:
            assert children() == set()


async def test_a_worker_that_has_held_much_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REUSE_BYTES_MAX", 1000)
    async with open_workers() as workers:
        await workers.check(INTEGERS, b"[1" + b",1" * 1000 + b"]", "arguments", "a")
        assert children() == set()


async def test_one_caller_has_one_check_at_a_time() -> None:
    """So the check of another principal does not wait for all of them."""
    order: list[str] = []
    async with open_workers() as workers, trio.open_nursery() as nursery:

        async def check(name: str, principal: str, encoded: bytes) -> None:
            await why(workers, ENDLESS, encoded, principal)
            order.append(name)

        for number in range(3):
            nursery.start_soon(check, f"greedy {number}", "greedy", nested(60))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(check, "other", "other", nested(2))
    assert order.index("other") <= 1


async def test_a_machine_without_processes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.sys, "executable", "/nonexistent/python")
    async with open_workers() as workers:
        told = await why(workers, INTEGERS, b"[1]")
        assert told == "arguments: cannot be checked now: try again later"
