"""The journals of `wrap` and `attach`: files in the user's folder of state, one for each key.

The key is in the file's name. It is a digest of all that two processes must have in common to share
an owner: for a command its words, its folder and its environment, for a URL the credentials. Hosts
give secrets to a server in its environment, so an owner that was started with one environment must
not serve a host that has given another one. The digest is made with a key of the user's own, in the
same folder, so that the names of files reveal nothing.

So are the side files of an owner whose journal is in a store: the lock, the socket, the log.

It is quick to load, because a relay loads it.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from streams.errors import JournalUnusable
from streams.journal.ownership import key_path
from streams.keys import Keyring
from streams.permissions import make_private_folders
from streams.process.options import CannotServe, Options

_FOLDER: Final = "name a folder with XDG_STATE_HOME"
_ELSEWHERE: Final = "name one with --journal, or a folder with XDG_STATE_HOME"

NAME_LETTERS_MAX: Final = 60  # of a file's name, which has 16 letters of the key too
KEY_LETTERS: Final = 16  # 64 bits: the files are those of one user

# Variables that say where a process was started, and not what it may do or shall do. All others
# count, also those that nothing is known of: any name may be that of a secret.
_PASSING: Final = re.compile(
    r"_|PWD|OLDPWD|SHLVL|TERM|COLORTERM|COLUMNS|LINES|WINDOWID|PS1|LS_COLORS|STY|TMUX|TMUX_PANE"
    r"|(TERM|VTE|KITTY|ITERM|GNOME_TERMINAL|KONSOLE|ALACRITTY|WEZTERM|VSCODE|ELECTRON)_\w+"
    r"|WT_SESSION|SSH_(CLIENT|CONNECTION|TTY)|XDG_(SESSION|SEAT|VTNR)\w*|DESKTOP_STARTUP_ID"
    r"|INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_EXEC_PID|MAINPID|MANAGERPID(FDID)?|NOTIFY_SOCKET"
    r"|LISTEN_(FDS|PID|PIDFDID|FDNAMES)|MEMORY_PRESSURE_\w+|CLAUDE_CODE_SSE_PORT|PYTEST_CURRENT_TEST"
)

# Programs that run another program, which has the name that a user knows.
_RUNNERS: Final = re.compile(
    r"npx|bunx|uvx|pipx|uv|pnpm|yarn|npm|bun|deno|node|tsx|python[0-9.]*|docker|podman|env"
)
_VERBS: Final = re.compile(r"run|exec|dlx|tool|x|-.*|\w+=.*")  # words of a runner before the name
# Options of runners: of the first the value is the name, of the second it is the next word.
_NAMING: Final = re.compile(r"--from|--package|-p|--spec")
_VALUED: Final = re.compile(
    r"--(python|with|directory|project|env-file|env|volume|network|mount|user|workdir|name)|-[evuw]"
)
_VERSION: Final = re.compile(r"(?<=.)(@|[=<>~!]=|\[).*")
_NOT_TYPABLE: Final = re.compile(r"[^A-Za-z0-9_.-]+")


def placed(options: Options, name: str, *key: object) -> Options:
    """The options with this key, JSON, and with the journal of the key where they name none.

    Raises `CannotServe`.
    """
    try:
        if options.journal is not None:
            keyring = Keyring.load(key_path(options.journal))
            return replace(options, key=key_of(keyring, *key))
        place = folder()
        # Owners at different addresses are different services.
        digest = key_of(Keyring.load(place / "key"), *key, options.ws, options.http)
        return replace(options, key=digest, journal=journal_of(place, name, digest))
    except RuntimeError:
        raise CannotServe(f"There is no home directory for a journal: {_ELSEWHERE}.") from None
    except (JournalUnusable, OSError) as error:
        raise CannotServe(f"No journal can be made: {error}: {_ELSEWHERE}.") from error


def beside_store(options: Options) -> Options:
    """The options of a relay with the place of its owner's side files, one for each store.

    Raises `CannotServe`.
    """
    assert options.store is not None
    try:
        place = folder()
        digest = key_of(Keyring.load(place / "key"), "store", options.store)
    except RuntimeError:
        raise CannotServe(f"There is no home directory for an owner's files: {_FOLDER}.") from None
    except (JournalUnusable, OSError) as error:
        raise CannotServe(f"No owner's files can be made: {error}: {_FOLDER}.") from error
    name = options.journal_shown.partition("://")[2]
    return replace(options, beside=journal_of(place, name, digest).with_suffix(".store"))


def folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The user's folder of state, which is made if it is missing.

    Raises `RuntimeError` if the user has no home directory, `OSError` if it cannot be made.
    """
    state = environment.get("XDG_STATE_HOME", "")
    # "All paths set in these environment variables must be absolute", else they are ignored.
    parent = Path(state) if os.path.isabs(state) else Path("~/.local/state").expanduser()
    path = parent / "mcp-streams"
    make_private_folders(path)
    return path


def journal_of(place: Path, name: str, key: str) -> Path:
    """The journal of this key in a folder; `name` is for people who look at the folder."""
    typable = _NOT_TYPABLE.sub("-", name)[:NAME_LETTERS_MAX].strip(".-") or "server"
    return place / f"{typable}-{key[:KEY_LETTERS]}.db"


def key_of(keyring: Keyring, *parts: object) -> str:
    """A digest of `parts`, which are JSON: 128 bits, in hex."""
    return keyring.call_names("owner", json.dumps(parts, sort_keys=True))[0].hex()


def environment_of_command(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment on which all relays of a command must agree."""
    return {name: value for name, value in environment.items() if not _PASSING.fullmatch(name)}


def name_of_command(words: Sequence[str]) -> str:
    """The name by which a user knows a command: that of its package, script or program."""
    found = _program(words[1:]) if _RUNNERS.fullmatch(_last_part(words[0])) else None
    return _last_part(_VERSION.sub("", found or words[0]))


def _program(words: Iterable[str]) -> str | None:
    """The word that names the program which a runner runs."""
    following = iter(words)
    for word in following:
        option, _, value = word.partition("=")
        if _NAMING.fullmatch(option):
            return value or next(following, None)
        if _VALUED.fullmatch(option):
            if not value:
                next(following, None)
        elif not _VERBS.fullmatch(word):
            return word
    return None


def _last_part(word: str) -> str:
    name = re.split(r"[/\\]", word.rstrip("/\\"))[-1]
    return re.sub(r"\.(py|js|mjs|cjs|ts|exe|cmd)$", "", name)
