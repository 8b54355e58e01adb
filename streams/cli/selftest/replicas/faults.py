"""The faults of a run with replicas. Each one is over, and all processes run, when it returns."""

import signal
from collections.abc import Awaitable, Callable
from random import Random
from typing import Final

import msgspec
import trio

from streams.cli.selftest.replicas.cluster import Cluster

LEASES_AWAY: Final = 3.0  # how long a replica is stopped or parted from the store

# How long a killed replica or store stays away. A store is back within a lease.
KILLED_S: Final = (0.0, 3.0)
STORE_AWAY_LEASES: Final = (0.0, 0.75)

BEHIND_S: Final = (0.0, 0.5)  # how far the copy is behind when it becomes the primary

# Beyond the lease, or the outage of the store.
SILENCE_MORE_S: Final = 0.5
OUTAGE_MORE_S: Final = 1.0
ROLLING_SILENCE_S: Final = 1.0


async def kill(cluster: Cluster, dice: Random, lease_s: float) -> float:
    """Kill a replica, and start it again."""
    replica = dice.choice(cluster.replicas)
    await replica.kill()
    await trio.sleep(dice.uniform(*KILLED_S))
    await replica.start()
    await replica.up()
    return 0.0


async def stop(cluster: Cluster, dice: Random, lease_s: float) -> float:
    """Stop a replica with SIGSTOP for three leases. When it goes on, others own its streams."""
    replica = dice.choice(cluster.replicas)
    replica.signal(signal.SIGSTOP)
    await trio.sleep(LEASES_AWAY * lease_s)
    replica.signal(signal.SIGCONT)
    await replica.up()
    return 0.0


async def kill_store(cluster: Cluster, dice: Random, lease_s: float) -> float:
    """Kill the store, and start it again within a lease."""
    began_at = trio.current_time()
    await cluster.primary.kill()
    await trio.sleep(lease_s * dice.uniform(*STORE_AWAY_LEASES))
    await cluster.primary.start()
    await cluster.primary.up()
    outage_s = trio.current_time() - began_at
    await _all_up(cluster)
    return outage_s


async def partition(cluster: Cluster, dice: Random, lease_s: float) -> float:
    """Part a replica from the store for three leases, by silence or by refused connections."""
    replica = dice.choice(cluster.replicas)
    cables = cluster.cables[replica]
    replica.write("parted from the store")
    if dice.random() < 1 / 2:
        cables.part()
        await trio.sleep(LEASES_AWAY * lease_s)
        cables.mend()
    else:
        cables.lead_to(None)
        cables.reset()
        await trio.sleep(LEASES_AWAY * lease_s)
        cables.lead_to(cluster.primary.port)
    replica.write("no longer parted from the store")
    await replica.up()
    return 0.0


async def failover(cluster: Cluster, dice: Random, lease_s: float) -> float:
    """Let the copy fall behind, kill the primary, and make the copy the primary.

    The outage lasts until the new primary leads; where a copy must acknowledge, until it has one.
    """
    assert cluster.copy is not None
    began_at = trio.current_time()
    cluster.link.part()
    await trio.sleep(dice.uniform(*BEHIND_S))
    await cluster.primary.kill()
    cluster.primary, cluster.copy = cluster.copy, cluster.primary
    await cluster.primary.lead()
    cluster.lead()
    outage_s = trio.current_time() - began_at
    for cables in cluster.cables.values():
        cables.reset()
    cluster.link.mend()
    await cluster.copy.start()
    await cluster.copy.up()
    await cluster.copy.follow(cluster.link.port)
    if cluster.replicas_acked:
        outage_s = trio.current_time() - began_at
    await _all_up(cluster)
    return outage_s


async def roll(cluster: Cluster, dice: Random, lease_s: float) -> float:
    """Replace each replica, one after the other, with a lease between them."""
    for replica in list(cluster.replicas):
        await cluster.replace(replica)
        await trio.sleep(lease_s)
    return 0.0


async def _all_up(cluster: Cluster) -> None:
    for replica in cluster.replicas:
        await replica.up()


class Fault(msgspec.Struct, frozen=True):
    """A kind of fault, as a row of the report."""

    name: str
    says: str
    inflict: Callable[[Cluster, Random, float], Awaitable[float]]  # returns the store's outage
    with_copy: bool = False
    replicas_acked: int = 0
    cuts: bool = False  # the network to the store: a proxy is between
    may_gap: bool = False  # the store may lose what it has acknowledged, and clients are told
    may_take_over: bool = True

    def silence_max_s(self, lease_s: float) -> float | None:
        """The longest silence that is promised; beyond the outage, if the store is away."""
        if self.name == "store-kill":
            return OUTAGE_MORE_S
        if self.name == "rolling":
            return ROLLING_SILENCE_S
        return None if self.with_copy else lease_s + SILENCE_MORE_S


FAULTS: Final = {
    one.name: one
    for one in (
        Fault("kill", "SIGKILL of a replica", kill),
        Fault("stop", "SIGSTOP of a replica for three leases", stop),
        Fault("store-kill", "SIGKILL of the store", kill_store, may_take_over=False),
        Fault("rolling", "a rolling update, with SIGTERM of each replica", roll),
        Fault("partition", "a replica without the store for three leases", partition, cuts=True),
        Fault("failover", "failover, one copy acknowledges", failover, True, 1, cuts=True),
        Fault(
            "failover-behind",
            "failover to a copy that is behind",
            failover,
            with_copy=True,
            cuts=True,
            may_gap=True,
        ),
    )
}
