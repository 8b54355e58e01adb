"""A server whose `fill`, `store` and `pace` make one mistake, for the test of the benchmarks."""

import os
import time
from collections.abc import Callable

from benchmarks.numbered import FIRST, METHOD, params, text_for, timed_params
from streams import Call, Server

lossy = Server("lossy", resume_min_s=0)
twisted = Server("twisted", resume_min_s=0)
curt = Server("curt", resume_min_s=0)


async def _fill(call: Call, size: int, numbers: list[int]) -> int:
    for number in numbers:
        await call.notify(METHOD, params(FIRST + number, text_for(size)))
    return len(numbers)


@lossy.tool(name="fill")
async def fill_without_one(call: Call, count: int, size: int) -> int:
    """Leave out one in the middle."""
    return await _fill(call, size, [n for n in range(count) if n != count // 2])


@twisted.tool(name="fill")
async def fill_out_of_order(call: Call, count: int, size: int) -> int:
    """Swap the last two."""
    return await _fill(call, size, [*range(count - 2), count - 1, count - 2])


@curt.tool(name="fill")
async def fill_too_few(call: Call, count: int, size: int) -> int:
    """Leave out the last one."""
    return await _fill(call, size, list(range(count - 1)))


def _add_others(server: Server, spoiled: Callable[[list[int]], list[int]]) -> None:
    @server.tool
    async def process() -> int:
        """As in the benchmarks."""
        return os.getpid()

    @server.tool
    async def store(
        call: Call, count: int, size: int, at_ns: int, is_flushed: bool = False
    ) -> list[int]:
        """Spoil the messages."""
        await _fill(call, size, spoiled(list(range(count))))
        return [at_ns, time.monotonic_ns()]

    @server.tool
    async def pace(call: Call, count: int, size: int, per_second: int) -> int:
        """Spoil the messages."""
        for number in spoiled(list(range(count))):
            sent = timed_params(FIRST + number, time.monotonic_ns(), text_for(size))
            await call.notify(METHOD, sent)
        return count


_add_others(lossy, lambda numbers: [n for n in numbers if n != len(numbers) // 2])
_add_others(twisted, lambda numbers: [*numbers[:-2], numbers[-1], numbers[-2]])
_add_others(curt, lambda numbers: numbers[:-1])
