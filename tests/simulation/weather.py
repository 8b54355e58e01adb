"""When faults occur: how long messages take, when connections are cut, when processes die."""

import math

import trio

from tests.simulation.world import World

FOREVER = math.inf


class Weather:
    """Draws the next fault; once the world is calm, no fault occurs."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = world.chance
        self._plan = world.plan

    def is_so(self, probability: float) -> bool:
        """Whether a fault of this likelihood occurs."""
        return self._chance.random() < probability and not self._world.is_calm

    def latency_s(self, client: str = "") -> float:
        """The delay of a piece of a message of a client."""
        if self._plan.latency_s == 0:
            return 0.0
        if self.is_so(0.01):
            late_s = self._chance.uniform(0, 20)
            self._world.disturb(2 * late_s, client)
            return late_s
        return self._chance.uniform(0, 2 * self._plan.latency_s)

    def cut_in_s(self) -> float:
        """In how many seconds a new connection is cut."""
        return self._in_s(self._plan.cut_every_s)

    def crash_in_s(self) -> float:
        """In how many seconds a new server dies; sometimes while it starts."""
        if self.is_so(0.1) and self._plan.crash_every_s < 1e9:
            return self._chance.uniform(0, 0.1)
        return self._in_s(self._plan.crash_every_s)

    def trouble_in_s(self) -> float:
        """In how many seconds the journal is full for a while."""
        return self._in_s(self._plan.trouble_every_s)

    def _in_s(self, every_s: float) -> float:
        left_s = self._plan.chaos_s - trio.current_time()
        in_s = self._chance.expovariate(1 / every_s)
        return in_s if in_s < left_s else FOREVER

    def notice_s(self) -> float:
        """How long it takes an end to notice that its connection is dead."""
        if self._world.is_calm:
            return 0.0
        return self._chance.choice((0.0, 0.0, self._chance.uniform(0, 5), 90.0))
