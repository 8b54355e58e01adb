"""The promises of the store: its settings, as found when the journal is opened."""

import re
from typing import Any, Final

import msgspec

from streams.errors import JournalUnusable
from streams.journal.redis.addresses import Address
from streams.journal.redis.link import Link
from streams.limits import Durability

VERSION_MIN: Final = (7, 0)  # functions, sharded channels
WAITAOF_MIN: Final = (7, 2)
_ASKED: Final = ("appendonly", "appendfsync", "maxmemory-policy")


class Settings(msgspec.Struct, frozen=True):
    """The settings of a server that matter to a journal; None where it does not say."""

    server: str  # identifies the running process of the server
    name: str  # of the program: "Redis" or "Valkey"
    version: tuple[int, ...]
    was_promoted: bool  # it may have been a replica, or have begun anew from a copy
    is_append_only: bool | None = None
    fsync: str | None = None
    policy: str | None = None

    @property
    def is_synced(self) -> bool:
        """Whether a write is on the server's disk before it is answered."""
        return bool(self.is_append_only) and self.fsync == "always"


async def look(link: Link) -> Settings:
    """Ask a server for its settings. A managed service may answer less."""
    info = await _info(link)
    found: dict[str, str] = {}
    for name in _ASKED:
        answer: Any = await link.if_allowed(b"CONFIG", b"GET", name)
        if answer is None:  # INFO says some of it
            break
        found |= {key.decode(): value.decode() for key, value in answer.items()}
    is_append_only = found.get("appendonly", info.get("aof_enabled"))
    is_valkey = info.get("server_name") == "valkey"
    version = info.get("valkey_version" if is_valkey else "redis_version", "")
    return Settings(
        server=info.get("run_id", ""),
        name="Valkey" if is_valkey else "Redis",
        version=tuple(map(int, re.findall(r"\d+", version)[:3])),
        was_promoted=set(info.get("master_replid2", "?")) != {"0"},
        is_append_only=None if is_append_only is None else is_append_only in ("yes", "1"),
        fsync=found.get("appendfsync"),
        policy=found.get("maxmemory-policy", info.get("maxmemory_policy")),
    )


async def _info(link: Link) -> dict[str, str]:
    answer: bytes = await link.if_allowed(b"INFO") or b""
    lines = answer.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and line[0] != "#")


def check(found: Settings, address: Address, durability: Durability, replicas_acked: int) -> None:
    """Raise `JournalUnusable` if a journal would not be safe in such a store."""
    version = ".".join(map(str, found.version))
    if found.version and found.version < VERSION_MIN:
        raise JournalUnusable(
            f"{address} is {found.name} {version}: a journal needs Redis 7.0 or Valkey 7.2, or "
            "newer."
        )
    if why := why_unsafe(found.policy, address):
        raise JournalUnusable(f"{why}: set it to noeviction, or use another store.")
    if not replicas_acked or durability == "process":
        return
    if found.version and found.version < WAITAOF_MIN:
        raise JournalUnusable(
            f"{address} is {found.name} {version}, which has no WAITAOF: use 7.2 or newer, or "
            "durability process, which waits until replicas have a commit in memory (WAIT)."
        )
    if found.is_append_only is False:
        raise JournalUnusable(
            f"{address} has appendonly no, so WAITAOF cannot be asked: set appendonly yes, or use "
            "durability process, which waits until replicas have a commit in memory (WAIT)."
        )


def why_unsafe(policy: str | None, address: Address) -> str:
    """Why a store with this `maxmemory-policy` must not be used; "" where it may, or tells none."""
    if policy in (None, "noeviction"):
        return ""
    return f"{address} has maxmemory-policy {policy}, which deletes messages when memory is short"


def described(
    found: Settings, address: Address, durability: Durability, replicas_acked: int
) -> str:
    """One line: what a crash of the store may cost."""
    version = ".".join(map(str, found.version))
    return (
        f"{address} ({found.name} {version}): {_crash(found, durability, replicas_acked)}; "
        f"{_failover(durability, replicas_acked)}"
    )


def _crash(found: Settings, durability: Durability, replicas_acked: int) -> str:
    if found.is_synced or (replicas_acked and durability == "power"):
        return "a crash of its machine loses nothing"
    if found.is_append_only is None:
        return "it does not say what a crash of its machine may lose"
    if not found.is_append_only:
        return "a crash may lose all since its last snapshot (appendonly no)"
    lost = {"everysec": "up to 2 s of messages", "no": "what the system has not written"}
    return (
        "a crash of its process loses nothing, one of its machine may lose "
        f"{lost.get(found.fsync or '', 'messages')} (appendfsync {found.fsync or 'unknown'})"
    )


def _failover(durability: Durability, replicas_acked: int) -> str:
    if not replicas_acked:
        return "a failover may lose what its replica lacks, and clients are told so"
    where = "on disk" if durability == "power" else "in memory"
    return (
        f"a failover loses nothing if one of the {replicas_acked} replicas with each commit "
        f"{where} is promoted"
    )
