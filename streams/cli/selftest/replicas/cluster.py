"""A store, replicas of a server on it, and a balancer in front of them.

For faults of the network, each replica reaches the store through a proxy of its own (`Cables`),
which can part them. The proxies also are what a sentinel is elsewhere: they lead to the primary of
the moment. A copy of the store follows the primary through one more proxy, so that it can be made
to fall behind. For other faults the replicas connect to the store themselves, which is cheaper.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Final

import trio

from streams.cli.selftest.cables import Cables
from streams.cli.selftest.replicas.processes import (
    Balancer,
    Program,
    Replica,
    Store,
    balancer_program,
    store_program,
)
from streams.exchange import ClientChannel
from transports import dial

SCHEMES: Final = ("http", "ws")

# A call without a ticket is never resumed, and counts towards the first limit.
_LIMITS: Final = (
    "streams_per_principal_max=1000000",
    "sessions_max=1000000",
    "restarts_max=1000000",
)


class Plan:
    """The parts of a cluster. `with_copy` gives the store a copy that may become primary, and
    `with_cables` each replica a proxy to the store.
    """

    def __init__(
        self,
        folder: Path,
        app: str,
        *,
        replicas: int,
        lease_s: float,
        with_copy: bool = False,
        with_cables: bool = False,
        replicas_acked: int = 0,
    ) -> None:
        self.folder = folder
        self.app = app
        self.replicas = replicas
        self.lease_s = lease_s
        self.with_copy = with_copy
        self.with_cables = with_cables
        self.replicas_acked = replicas_acked

    def options(self, store_port: int) -> list[str]:
        """The options of a replica that reaches the store at this port."""
        url = f"redis://127.0.0.1:{store_port}/0"
        options = ["--journal", url, "--lease", f"{self.lease_s:g}"]
        if self.replicas_acked:
            options += ["--replicas-acked", str(self.replicas_acked)]
        return options + [word for limit in _LIMITS for word in ("--limit", limit)]


class Cluster:
    """See the module; made by `cluster`."""

    def __init__(self, plan: Plan, cables: Sequence[Cables], link: Cables, dice: Random) -> None:
        """`cables` lead each replica to the store, with one that is spare, and `link` leads the
        copy to the primary.
        """
        program, _ = store_program()
        self.primary = Store("store-1", program, plan.folder)
        self.copy = Store("store-2", program, plan.folder) if plan.with_copy else None
        self.replicas_acked = plan.replicas_acked
        self.link = link
        ports = [one.port if plan.with_cables else self.primary.port for one in cables]
        places = [
            Replica(number, plan.app, plan.options(port), plan.folder)
            for number, port in enumerate(ports, 1)
        ]
        self.cables = dict(zip(places, cables, strict=True))
        *self.replicas, self._spare = places
        haproxy = balancer_program()
        self.balancer = Balancer(haproxy, places, plan.folder) if haproxy else None
        self._dice = dice

    @property
    def programs(self) -> list[Program]:
        """All processes."""
        others = [one for one in (self.copy, self.balancer) if one is not None]
        return [self.primary, *self.cables, *others]

    def dialer(self, scheme: str) -> AbstractAsyncContextManager[ClientChannel]:
        """Connect to the balancer; without one, to any replica."""
        if self.balancer is not None:
            port = self.balancer.port
        else:
            replica = self._dice.choice(self.replicas)
            port = replica.http if scheme == "http" else replica.ws
        path = "mcp" if scheme == "http" else "ws"
        return dial(f"{scheme}://127.0.0.1:{port}/{path}")()

    async def start(self) -> None:
        """Start all processes. Raises `NoServer`."""
        await self.primary.start()
        await self.primary.up()
        self.lead()
        if self.copy is not None:
            await self.copy.start()
            await self.copy.up()
            await self.copy.follow(self.link.port)
        for replica in self.replicas:
            await replica.start()
        for replica in self.replicas:
            await replica.up()
        if self.balancer is not None:
            await self.balancer.start()
            await self.balancer.up()

    async def replace(self, replica: Replica) -> None:
        """Start another replica, and end this one with SIGTERM when that is ready."""
        await self._spare.start()
        await self._spare.up()
        self.replicas[self.replicas.index(replica)] = self._spare
        self._spare = replica
        await replica.stop()

    def lead(self) -> None:
        """Lead the replicas and the copy to the primary."""
        for cables in (*self.cables.values(), self.link):
            cables.lead_to(self.primary.port)


@asynccontextmanager
async def cluster(plan: Plan, dice: Random) -> AsyncIterator[Cluster]:
    """Make a cluster, and kill its processes at the end. Raises `NoServer`."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    async with trio.open_nursery() as nursery:
        cables = [Cables() for _ in range(plan.replicas + 2)]  # of a spare one and the copy, too
        for one in cables:
            await nursery.start(one.serve)
        made = Cluster(plan, cables[:-1], cables[-1], dice)
        try:
            await made.start()
            yield made
        finally:
            with trio.CancelScope(shield=True):
                for program in made.programs:
                    await program.kill()
        nursery.cancel_scope.cancel()
