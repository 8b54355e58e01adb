"""A server whose `fill` makes one mistake, for the test of the benchmarks."""

from benchmarks.numbered import FIRST, METHOD, params, text_for
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
