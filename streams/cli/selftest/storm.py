"""The random failures of the servers and the network in a torture run, and how the run ends."""

import math
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Final

import trio

from streams.cli.interrupts import ending_signals
from streams.cli.selftest.callers import Caller
from streams.cli.selftest.ledger import Ledger
from streams.cli.selftest.rigs import STOP_S, NoServer, Rig
from streams.cli.selftest.torture_child import CHILDREN

CALLERS: Final = 3  # per transport

SERVER_LASTS_S: Final = (0.001, 2.0)  # from the start of a server to its end
UNIFORM_ONE_IN: Final = 4
NETWORK_LASTS_S: Final = (0.05, 3.0)  # between two failures of the network
SILENCE_S: Final = (0.1, 3.0)
CHILD_LASTS_S: Final = (0.02, 1.0)  # between two kills of a wrapped command
CUT_AFTER_BYTES: Final = 4_000
SIGTERM_ONE_IN: Final = 8
WHILE_IT_STARTS_ONE_IN: Final = 4
RETRY_S: Final = 0.2

# Within this time every call must end, once nothing fails any more.
CALM_S: Final = 60.0


class Front:
    """One transport: a server, its users, and their failures."""

    def __init__(self, name: str, rig: Rig, notes: Path, dice: Random) -> None:
        """`notes` is a folder for the tools' notes, and for those of a wrapped command."""
        (notes / CHILDREN).mkdir(parents=True)
        self._notes = notes
        self.ledger = Ledger(name, notes)
        self._rig = rig
        self._dice = dice
        self._callers = [
            Caller(
                f"{name}-{number}",
                rig.dialer,
                self.ledger,
                Random(dice.random()),  # nosec B311 # random behaviour, not a secret
                begins_short=number == 1,  # so that each run has both, however soon it ends
            )
            for number in range(1, CALLERS + 1)
        ]

    async def call(self) -> None:
        """Let the users call, until they stop by themselves."""
        async with trio.open_nursery() as nursery:
            for caller in self._callers:
                nursery.start_soon(caller.go_on)

    async def kill_repeatedly(self) -> None:
        """Start the server and end it, until cancelled."""
        while True:
            is_starting = await self._rig.spawn()
            try:
                await self._live(is_starting)
                if self._dice.randrange(SIGTERM_ONE_IN) == 0:
                    self._note_fault()
                    self.ledger.figures.restarts += await self._rig.stop()
                else:
                    await self._kill()
            except NoServer as error:
                self.ledger.fail(f"the server: {error}")
                await trio.sleep(RETRY_S)

    async def _live(self, is_starting: bool) -> None:
        lasts_s = self._lifetime_s()
        with trio.CancelScope() as life:
            if is_starting and self._dice.randrange(WHILE_IT_STARTS_ONE_IN) == 0:
                life.deadline = trio.current_time() + lasts_s
            await self._rig.up()
            life.deadline = min(life.deadline, trio.current_time() + lasts_s)
            await trio.sleep_forever()

    def _lifetime_s(self) -> float:
        """Mostly, orders of magnitude from 1 ms to 2 s are equally likely; else all lengths are."""
        if self._dice.randrange(UNIFORM_ONE_IN) == 0:
            return self._dice.uniform(*SERVER_LASTS_S)
        return math.exp(self._dice.uniform(*map(math.log, SERVER_LASTS_S)))

    async def _kill(self) -> None:
        self._note_fault()
        self.ledger.figures.kills += await self._rig.kill()

    async def cut_repeatedly(self) -> None:
        """Make the network fail in one way or another, until cancelled."""
        ways: list[Callable[[], int]] = [
            self._rig.cut,
            lambda: self._rig.cut(self._dice.randint(1, CUT_AFTER_BYTES)),
            self._rig.reset,
            self._rig.silence,
        ]
        while True:
            await trio.sleep(self._dice.uniform(*NETWORK_LASTS_S))
            way = self._dice.choice(ways)
            if not way():
                continue  # nothing was connected
            self._note_fault()
            self.ledger.figures.cuts += 1
            if way == self._rig.silence:
                await trio.sleep(self._dice.uniform(*SILENCE_S))
                self._rig.reset()

    async def kill_children_repeatedly(self) -> None:
        """Kill the processes of a wrapped command, until cancelled."""
        while True:
            await trio.sleep(self._dice.uniform(*CHILD_LASTS_S))
            if children := sorted(children_of(self._notes)):
                self._note_fault()
                self.ledger.figures.child_kills += _kill(self._dice.choice(children))

    def _note_fault(self) -> None:
        for caller in self._callers:
            caller.note_fault()

    async def calm(self) -> None:
        """Kill the server one last time and start it for good; no new calls are made."""
        for caller in self._callers:
            caller.is_storming = False
        self._rig.cut()
        await self._kill()
        try:
            await self._rig.start()
        except NoServer as error:
            self.ledger.fail(f"the server: {error}")

    async def end(self) -> None:
        """Stop the server and count."""
        try:
            await self._rig.stop()
        except NoServer as error:
            self.ledger.fail(f"the server: {error}")
        with trio.move_on_after(STOP_S):
            while children_of(self._notes):
                await trio.sleep(RETRY_S)
        for child in children_of(self._notes):
            self.ledger.fail(f"the child {child} runs on without its server")
            _kill(child)
        self.ledger.settle_all()


def children_of(notes: Path) -> set[int]:
    """The processes of a wrapped command that run, by the files that they have left."""
    found = set()
    for file in (notes / CHILDREN).iterdir():
        command = Path("/proc", file.name, "cmdline")
        try:
            is_running = os.fsencode(notes) in command.read_bytes()
        except OSError:  # it has ended
            is_running = False
        if is_running:
            found.add(int(file.name))
        else:
            file.unlink()
    return found


def _kill(process: int) -> bool:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return False  # it has just ended
    return True


class Storm:
    """The whole run, on all fronts."""

    def __init__(self, fronts: Sequence[Front], lasts_s: float) -> None:
        self.fronts = fronts
        self.is_over = False
        self._lasts_s = lasts_s
        self._ends_at = 0.0
        self._failures = trio.CancelScope()
        self._whole = trio.CancelScope()

    @property
    def left_s(self) -> float:
        """Seconds until the failures end."""
        return max(0.0, self._ends_at - trio.current_time())

    async def run(self) -> None:
        """Make things fail, and then wait until all calls have ended, a minute at most."""
        self._ends_at = self._failures.deadline = trio.current_time() + self._lasts_s
        with self._whole:
            async with trio.open_nursery() as callers:
                for front in self.fronts:
                    callers.start_soon(front.call)
                with self._failures:
                    async with trio.open_nursery() as nursery:
                        for front in self.fronts:
                            nursery.start_soon(front.kill_repeatedly)
                            nursery.start_soon(front.cut_repeatedly)
                            nursery.start_soon(front.kill_children_repeatedly)
                self.is_over = True
                self._whole.deadline = trio.current_time() + CALM_S
                for front in self.fronts:
                    await front.calm()

    async def handle_signals(self, *, task_status: trio.TaskStatus[None]) -> None:
        """The first signal ends the failures, the second the wait for the calls."""
        with trio.open_signal_receiver(*ending_signals()) as signals:
            task_status.started()
            async for _ in signals:
                (self._whole if self._failures.cancel_called else self._failures).cancel()
                self._failures.cancel()
