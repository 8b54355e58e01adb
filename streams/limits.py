"""Every limit of a server that a user may set, with its default."""

from typing import Literal

import msgspec

MIB = 1024 * 1024
DAY_S = 86_400.0
LEASE_S = 2.0  # of a replica, unless it is said otherwise
# A shorter lease than this expires while a busy machine runs other processes; a longer silence than
# an hour is one that a client does not wait for.
LEASE_MIN_S = 0.1
LEASE_MAX_S = 3600.0
# When a client tries again while the store of replicas is away. The answer costs no question to
# the store, and a store that restarts is back within a second or two.
STORE_RETRY_S = 0.25
CACHE_BYTES_MAX = 64 * MIB
JOURNAL_BYTES_MIN = 16 * MIB  # less has no room for a few long messages and their WAL
_MAY_BE_ZERO = (
    "journal_bytes_max",
    "journal_cache_bytes_max",
    "resident_max",
    "bytes_per_principal_max",
    "requests_per_principal_max",
)


Overflow = Literal["block", "fail"]
"""A tool that sends faster than its client reads waits, or fails."""

Durability = Literal["power", "process"]
"""A committed message survives a power failure, or only the end of the process."""

LogFormat = Literal["text", "json"]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much a server keeps for its clients. All are maxima; bytes are those of encoded messages.

    `unsent_…` count messages that were never written to a connection, for each stream.
    `undelivered_bytes_max` counts those that were written and may not have arrived.
    """

    unsent_entries_max: int = 100_000
    unsent_bytes_max: int = 64 * MIB
    undelivered_bytes_max: int = 64 * MIB
    streams_per_principal_max: int = 1_000
    bytes_per_principal_max: int = 4096 * MIB  # undelivered, of streams in memory; 0: no limit
    requests_per_principal_max: float = 0.0  # a second, in the long run; 0: no limit
    streams_max: int = 1_000_000
    journal_bytes_max: int = 16_384 * MIB  # of the journal's file and its WAL; 0: no limit
    journal_cache_bytes_max: int = CACHE_BYTES_MAX  # of the newest lines, also in memory; 0: none
    # The share of all anonymous callers together. A limit for each would bound nothing: an
    # anonymous caller gets a new name with each connection.
    journal_anonymous_share: float = 0.25
    resident_max: int = 5_000  # ended streams in memory without a reader; 0: all are evicted
    connections_max: int = 10_000
    connections_per_principal_max: int = 1_000  # of authenticated callers; over HTTP, requests
    sessions_max: int = 10_000  # over HTTP
    sessions_per_principal_max: int = 1_000
    message_bytes_max: int = 4 * MIB
    checkpoint_bytes_max: int = 64 * 1024
    restarts_max: int = 10  # how often a call is restarted without making progress
    session_idle_s: float = DAY_S  # an unused session ends after this time
    tombstone_s: float = DAY_S  # how long an abandoned or cancelled stream is remembered
    drained_s: float = DAY_S  # how long a completed and delivered stream keeps its status
    last_page_s: float = 120.0  # how long the last page can be requested once more

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not value > 0 and not (value == 0 and name in _MAY_BE_ZERO):
                least = "0 or more" if name in _MAY_BE_ZERO else "above 0"
                raise ValueError(f"{name} must be {least}, not {value}")
        if 0 < self.journal_bytes_max < JOURNAL_BYTES_MIN:
            raise ValueError(
                f"journal_bytes_max must be {JOURNAL_BYTES_MIN} or more, not "
                f"{self.journal_bytes_max}; 0 is no limit"
            )
        if self.journal_anonymous_share > 1:
            raise ValueError(
                f"journal_anonymous_share must be 1 or less, not {self.journal_anonymous_share}"
            )

    @property
    def anonymous_bytes_max(self) -> int:
        """The share of anonymous callers in bytes; 0: no limit."""
        return int(self.journal_bytes_max * self.journal_anonymous_share)
