"""Calls that survive any number of SIGKILLs of their server, over every transport.

`RESTART_KILLS` sets the number; 50 kills take a thousand steps.
"""

import os
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import trio

from streams.errors import CallFailed
from tests.acceptance.calls import number, open_client
from tests.acceptance.conftest import Serve
from tests.acceptance.restarting_server import EVERY
from tests.rigs.clients import Params

APP = f"{Path(__file__).with_name('restarting_server.py')}:server"
KILLS = int(os.environ.get("RESTART_KILLS", "3"))
STEPS = 20 * KILLS
PAUSE_S = 0.01
SHORT_PAUSES_S = (0.0, 0.004, 0.006, 0.02)  # the record is stored after 5 to 10 ms
SERVER_LASTS_S = (0.0, 0.3)
WITHIN_S = 60 + 15 * KILLS  # a bound for a test that hangs


@pytest.mark.timeout(2 * WITHIN_S)
async def test_a_killed_call_goes_on_and_every_message_comes_once(
    serve: Serve, kind: str, tmp_path: Path
) -> None:
    dice, served, effects = random.Random(kind), serve(APP), tmp_path / "effects"
    enough = tmp_path / "enough"
    given = {"steps": STEPS, "pause_s": PAUSE_S, "effects": str(effects), "until": str(enough)}
    asked: list[int] = []
    heard: list[int] = []

    async def answer(params: Params) -> Params:
        asked.append(int(params["message"]))
        return {"n": asked[-1]}

    async def kill_again_and_again() -> None:
        for step in sorted(dice.sample(range(1, STEPS), KILLS)):
            while len(heard) < step:
                await trio.sleep(0.001)
            await trio.sleep(dice.uniform(0, EVERY * PAUSE_S))
            await trio.to_thread.run_sync(served.restart)
        enough.touch()

    async with (
        open_client(served, kind, within_s=WITHIN_S, answers={"elicitation/create": answer}) as (
            client,
            _,
        ),
        trio.open_nursery() as nursery,
        client.call("work", given) as call,
    ):
        nursery.start_soon(kill_again_and_again)
        async for message in call:
            if message.method == "notifications/message":
                heard.append(number(message))
        result = await call.result()
    assert heard == list(range(1, STEPS + 1))
    assert result["content"][0]["text"] == ",".join(map(str, asked))
    assert asked == sorted(set(asked)), "nothing is asked twice"
    done = [int(line) for line in effects.read_text().split()]
    assert sorted(set(done)) == heard
    repeated = [before + 1 - after for before, after in pairwise(done)]
    assert max(repeated) <= EVERY, "no more than what follows a checkpoint"


@pytest.mark.timeout(2 * WITHIN_S)
async def test_short_calls_are_answered_and_not_run_twice(
    serve: Serve, kind: str, tmp_path: Path
) -> None:
    """Each call of our client has a key. So a tool that restarts is always done; any other one may
    be interrupted, and is not run twice."""
    dice, served, effects = random.Random(kind), serve(APP), tmp_path / "effects"
    effects.touch()
    outcomes: dict[str, str] = {}
    killed = trio.Event()

    async def kill_again_and_again() -> None:
        for _ in range(KILLS):
            await trio.sleep(dice.uniform(*SERVER_LASTS_S))
            await trio.to_thread.run_sync(served.restart)
        killed.set()

    async with (
        open_client(served, kind, within_s=WITHIN_S) as (client, _),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(kill_again_and_again)
        while not killed.is_set():
            tool = dice.choice(("brief", "brief_lasting"))
            name = f"{tool}-{len(outcomes)}"
            given = {"name": name, "pause_s": dice.choice(SHORT_PAUSES_S), "effects": str(effects)}
            try:
                async with client.call(tool, given) as call:
                    outcomes[name] = (await call.result())["content"][0]["text"]
            except CallFailed as failed:
                outcomes[name] = failed.data["reason"]
    runs = Counter(effects.read_text().split())
    for name, outcome in outcomes.items():
        is_lasting = name.startswith("brief_lasting")
        assert outcome == name or (outcome == "interrupted" and not is_lasting)
        assert runs[name] == 1 or is_lasting or (outcome == "interrupted" and not runs[name])
        assert runs[name] or not is_lasting
