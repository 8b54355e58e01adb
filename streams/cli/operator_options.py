"""The options that several commands of operators have."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cyclopts import Parameter

from streams.cli.options import Seconds
from streams.journal.addresses import is_url, without_secrets

WATCH_MIN_S: Final = 0.1
_TOO_OFTEN: Final = f"--every: write seconds, {WATCH_MIN_S:g} or more."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Where:
    """Where operators look: at a server or in a journal.

    Parameters
    ----------
    admin
        The address of a server's --admin: http://HOST:PORT, https://HOST or unix:PATH.
    journal
        A journal: a file, the URL of a store, or the beginning of a name in the user's folder of
        state. The owner of a file is asked; without one the journal itself is read.
    token_file
        A file with the operator's token; without it, MCP_STREAMS_ADMIN_TOKEN is sent, or the token
        that a server of this user has kept for the address.
    """

    admin: str | None = None
    journal: str | None = None
    token_file: Path | None = None

    def two_places(self, named: str | None = None) -> str:
        """Refuse two places, `named` included: another server than the one that is meant could be
        ended. "" where one is named at most.
        """
        options = {"": named, "--admin ": self.admin, "--journal ": self.journal}
        found = [option + _shown(place) for option, place in options.items() if place]
        return f"{' and '.join(found)}: name one place." if len(found) > 1 else ""


def _shown(place: str) -> str:
    return without_secrets(place) if is_url(place) else place


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Output:
    """How a command shows what changes.

    Parameters
    ----------
    watch
        Show it again and again, until Ctrl-C.
    every
        Seconds between two looks of --watch.
    json
        Print JSON: one value, or with --watch one on each line.
    """

    watch: bool = False
    every: Seconds = 1.0
    json: bool = False

    @property
    def wrong(self) -> str:
        """The sentence that says what is wrong with these options, or ""."""
        return "" if self.every >= WATCH_MIN_S else _TOO_OFTEN


DEFAULT_WHERE: Final = Where()
DEFAULT_OUTPUT: Final = Output()
