"""A tool that counts its runs, and calls of it with a key."""

from typing import Any, Final

from streams import Call, Server
from tests.rigs.server import (
    Json,
    Steps,
    Talker,
)

LONG: Final = "0123456789abcdef0123456789abcdef"
SHORT: Final = "a key"


class Rig:
    """A server with a tool that counts its runs, then follows the test's orders."""

    def __init__(self, **settings: Any) -> None:
        self.server = Server("tested", **({"resume_min_s": 0, "resume_max_s": 600} | settings))
        self.runs = 0
        self.steps = Steps(self.server, name="unused")
        self.server.tool(name="step")(self.step)

    async def step(self, call: Call, n: int = 0, text: str = "") -> str:
        self.runs += 1
        return await self.steps.step(call)


async def call(
    talker: Talker, id: int | str, key: Any = LONG, *, name: str = "step", **more: Any
) -> None:
    """Make a call with a key; `more` are further params."""
    meta = {"mcp-streams/idempotencyKey": key} | more.pop("_meta", {})
    await talker.ask(id, "tools/call", name=name, _meta=meta, **({"arguments": {}} | more))


async def answered(talker: Talker, id: int | str, key: Any = LONG, **more: Any) -> Json:
    """Make a call with a key; returns its result, or the error."""
    await call(talker, id, key, **more)
    answer = await talker.answer(id)
    result: Json = answer["result"] if "result" in answer else answer["error"]
    return result
