"""Every limit of a server that a user may set, with its default."""

from typing import Literal

import msgspec

MIB = 1024 * 1024
DAY_S = 86_400.0
JOURNAL_BYTES_MIN = 16 * MIB  # less has no place for a few long messages and their WAL
_MAY_BE_NOTHING = (
    "journal_bytes_max",
    "resident_max",
    "bytes_per_principal_max",
    "requests_per_principal_max",
)


Overflow = Literal["block", "fail"]
"""What a tool does that sends faster than its client reads: wait, or fail."""

Durability = Literal["power", "process"]
"""What a committed message survives: a power failure, or the end of the process."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much a server keeps for its clients. All are maxima.

    `unsent_…` count what was never written to any connection, for each stream;
    `undelivered_bytes_max` what was written and not yet known to have arrived. Bytes are those of
    the encoded messages.
    """

    unsent_entries_max: int = 100_000
    unsent_bytes_max: int = 64 * MIB
    undelivered_bytes_max: int = 64 * MIB
    streams_per_principal_max: int = 1_000
    bytes_per_principal_max: int = 4096 * MIB  # undelivered, of streams in memory; 0: no limit
    requests_per_principal_max: float = 0.0  # a second, in the long run; 0: no limit
    streams_max: int = 1_000_000
    journal_bytes_max: int = 16_384 * MIB  # of the journal's file and its WAL; 0: no limit
    # The part of that for all anonymous callers together: each can have as many names as it likes,
    # so a limit for each name bounds nothing.
    journal_anonymous_share: float = 0.25
    resident_max: int = 5_000  # that have ended and nobody follows; 0: all are in the journal alone
    connections_max: int = 10_000
    connections_per_principal_max: int = 1_000  # of who has shown who they are; over HTTP, requests
    sessions_max: int = 10_000  # over HTTP
    sessions_per_principal_max: int = 1_000
    message_bytes_max: int = 4 * MIB
    checkpoint_bytes_max: int = 64 * 1024
    restarts_max: int = 10  # how often a call is run again without getting any further
    session_idle_s: float = DAY_S  # after this long a session that nobody uses is ended
    tombstone_s: float = DAY_S  # how long it is remembered that a stream was abandoned or cancelled
    drained_s: float = DAY_S  # how long a completed and delivered stream keeps its status
    last_page_s: float = 120.0  # how long the last page can be asked for again

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not value > 0 and not (value == 0 and name in _MAY_BE_NOTHING):
                raise ValueError(f"{name} must be above 0, not {value}")
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
        """What the share is in bytes; 0 for no limit."""
        return int(self.journal_bytes_max * self.journal_anonymous_share)
