"""The tools of the simulated servers: they follow the plan, and tell the world each step.

A tool of a dead server may still run for a moment: its steps then no longer count.
"""

from functools import partial
from typing import Any, Final

import trio

from streams import Call, Server
from tests.simulation.lives import Life
from tests.simulation.plan import BRIEF_S, LONG_S, Step
from tests.simulation.world import Job, World


def make_server(world: World, life: Life) -> Server:
    """A server with the tools of `plan.TOOLS`."""
    plan = world.plan
    server = Server("simulated", resume_min_s=plan.min_s, resume_max_s=LONG_S, limits=plan.limits)
    work = partial(_work, world, life)
    for name, settings in _SETTINGS.items():

        async def tool(call: Call, job: str) -> str:
            """Follow the plan."""
            return await work(call, world.jobs[job])

        server.tool(name=name, **settings)(tool)

    @server.tool
    async def twin(of: str) -> str:
        """A second call under the request id of another call."""
        return f"the twin of {of}"

    return server


_SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "talk": {},
    "brief": {"resume_max_s": BRIEF_S},
    "strict": {"overflow": "fail"},
    "lasting": {"restart": True},
    "quick": {},
    "reading": {"annotations": {"readOnlyHint": True}},
    "repeating": {"annotations": {"idempotentHint": True}},
    "quick-lasting": {"restart": True},
    "reading-lasting": {"restart": True, "annotations": {"readOnlyHint": True}},
}


async def _work(world: World, life: Life, call: Call, job: Job) -> str:
    world.started(job)
    run = job.runs
    text = job.text_of(run)
    first = job.restore(call.restored)
    for n, step in enumerate(job.part.steps[first:], first):
        for _ in range(step.count):
            if step.pause_s:
                await trio.sleep(step.pause_s)
            await _live(life, job, run)
            await _take(world, life, call, job, step)
            await _live(life, job, run)
        if job.part.is_lasting:
            await call.checkpoint(job.state(n + 1))
            await _live(life, job, run)
            world.expect(
                job.is_recorded or not job.is_resumable,
                f"{job.key} has a checkpoint, and no record",
            )
    world.note("tool", f"{job.key} is done")
    if job.part.fails:
        raise RuntimeError(text)
    return text


async def _live(life: Life, job: Job, run: int) -> None:
    """Take no further step in a server that is dead, nor where another replica runs the call."""
    if life.is_over.is_set() or (life.is_replica and job.runs != run):
        await trio.sleep_forever()


async def _take(world: World, life: Life, call: Call, job: Job, step: Step) -> None:
    run = job.runs
    match step.kind:
        case "say" | "burst":
            job.said += 1
            await call.log("info", job.saying(job.said))
        case "report":
            job.reported += 1
            await call.progress(job.reported)
        case "flush":
            said = job.said
            await call.flush()
            await _live(life, job, run)
            world.expect(job.is_recorded, f"{job.key} is flushed, and its record is not durable")
            job.flushed = said
        case "ask":
            question = {"job": job.key, "question": job.answers + 1}
            answer = await call.request("elicitation/create", question)
            await _live(life, job, run)
            job.answers += 1
            world.expect(answer == {"to": question}, f"{job.key}: {question} got {answer}")
