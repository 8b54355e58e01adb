"""Settings of the command from the environment and from a TOML file.

An option of the command line comes first, then a variable of the environment, then the file. Only
this module knows the names of both; cyclopts reads and converts the values.
"""

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cyclopts import App
from cyclopts.config import Dict, Env

from streams.cli import base
from streams.errors import StreamsError, UnsafeFile
from streams.permissions import open_safe, real_path

PREFIX: Final = "MCP_STREAMS_"
VARIABLE: Final = f"{PREFIX}CONFIG"
FILE_BYTES_MAX: Final = 1024 * 1024
LIKE_PART: Final = 0.8  # of two names: then one is a misspelling of the other

_OPERATORS: Final = {"ls", "show", "tail", "stats", "drain", "cancel"}

Source = Callable[[App, tuple[str, ...], Any], object]

BUILT_IN: Final[list[Source]] = [Env(PREFIX)]
"""The sources that need no file."""


class CannotConfigure(StreamsError):
    """The file of settings cannot be used; the message says why, in one sentence."""


def path_of_user(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The path of the user's own file; None if the user has no home directory."""
    given = environment.get("XDG_CONFIG_HOME", "")
    try:
        # "All paths set in these environment variables must be absolute", else they are ignored.
        folder = Path(given) if os.path.isabs(given) else Path("~/.config").expanduser()
    except RuntimeError:
        return None
    return folder / "mcp-streams" / "config.toml"


def without_config(words: Sequence[str]) -> tuple[list[str], Path | None]:
    """Take `--config FILE` out of the words of a command line. Raises `CannotConfigure`."""
    end = words.index("--") if "--" in words else len(words)
    for at, word in enumerate(words[:end]):
        if word.startswith("--config="):
            return [*words[:at], *words[at + 1 :]], Path(word.removeprefix("--config="))
        if word == "--config":
            if at + 1 == end:
                raise CannotConfigure("--config: name a TOML file.")
            return [*words[:at], *words[at + 2 :]], Path(words[at + 1])
    return list(words), None


def sources(app: App, named: Path | None) -> list[Source]:
    """Where `app` finds settings besides the command line, the most important source first.

    `named` is the file of --config. Raises `CannotConfigure`.
    """
    told = os.environ.get(VARIABLE)
    path = named or (Path(told) if told else path_of_user())
    found: list[Source] = []
    if path is not None and (table := _read(path, must_exist=bool(named or told))) is not None:
        _check(app, table, str(path), ())
        found.append(Dict(table, source=str(path)))
    return [_check_variables, _place_word, *BUILT_IN, *found, _choose_place, _note_json]


def _check_variables(_: App, commands: tuple[str, ...], arguments: Any) -> None:
    """Refuse a variable that is empty, or almost the name of an option.

    Others are left alone: Kubernetes makes some for a service of such a name.
    """
    prefix = PREFIX + "".join(f"{each.upper()}_" for each in commands)
    given = [name.removeprefix(prefix) for name in os.environ if name.startswith(prefix)]
    known = [name.replace("-", "_").upper() for name in _names(arguments)]
    for name in given:
        if name in known and not os.environ[prefix + name]:
            raise CannotConfigure(f"{prefix}{name} is empty: give it a value, or unset it.")
        if name not in known and (close := base.alike(name, known, LIKE_PART)):
            raise CannotConfigure(f"{prefix}{name} is no option; did you mean {prefix}{close}?")


def _choose_place(_: App, commands: tuple[str, ...], arguments: Any) -> None:
    """Look for operators where the command line says, and at no second place of a variable."""
    if not set(commands) & _OPERATORS:
        return
    names = {"--admin", "--journal"} | ({"WHERE"} if commands != ("cancel",) else set())
    given = [each for each in arguments if each.name in names and each.tokens]
    for source in ("cli", "env"):
        first = [each for each in given if each.tokens[0].source == source]
        if first:
            for each in given:
                each.tokens = each.tokens if each in first else []
            return


def _place_word(app: App, commands: tuple[str, ...], arguments: Any) -> None:
    """Let the only word of `copy` be the target where a variable names the source alone."""
    if commands != ("copy",):
        return
    source, target = (arguments.get(name) for name in ("SOURCE", "TARGET"))
    is_set = [f"{PREFIX}COPY_{each.name}" in os.environ for each in (source, target)]
    if is_set == [True, False] and not target.tokens:
        source.tokens, target.tokens = [], source.tokens


def _note_json(app: App, commands: tuple[str, ...], arguments: Any) -> None:
    """Print errors as JSON if --json was set anywhere."""
    for argument in arguments:
        if argument.name == "--json" and argument.tokens:
            token = argument.tokens[-1]
            value = token.implicit_value if token.value == "" else token.value
            base.Errors.are_json = str(value).lower() in ("true", "1", "yes", "y", "t", "on")


def _read(path: Path, *, must_exist: bool) -> dict[str, Any] | None:
    try:
        with open(open_safe(real_path(path), is_secret=False), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CannotConfigure(f"{path}: this is no regular file: name a TOML file.")
            content = file.read(FILE_BYTES_MAX + 1)
    except UnsafeFile as error:
        raise CannotConfigure(f"{error}.") from None
    except FileNotFoundError:
        if not must_exist:
            return None
        raise CannotConfigure(f"{path}: there is no such file of settings.") from None
    except OSError as error:
        raise CannotConfigure(f"{path} cannot be read: {error.strerror}.") from None
    if len(content) > FILE_BYTES_MAX:
        raise CannotConfigure(f"{path} has more than {FILE_BYTES_MAX} bytes: name a TOML file.")
    import tomllib

    try:
        return tomllib.loads(content.decode())
    except ValueError as error:
        raise CannotConfigure(f"{path} is no TOML: {error}.") from None


def _check(app: App, table: Mapping[str, Any], path: str, above: tuple[str, ...]) -> None:
    """Check all names in the file, also those of commands that are not run.

    Raises `CannotConfigure`, which never shows a value: it may be a secret.
    """
    commands = {name for name in app if not name.startswith("-")}
    is_group = app.default_command is None
    options = set() if is_group else _names(app.assemble_argument_collection())
    for name, value in table.items():
        key = ".".join((*above, name))
        if name in commands:
            if not isinstance(value, dict):
                raise CannotConfigure(
                    f"{path}: {key} is a command, so write its settings in a table: [{key}]."
                )
            _check(app[name], value, path, (*above, name))
        elif name.replace("_", "-") not in options:
            nearest = base.nearest(name.replace("_", "-"), sorted({*commands, *options}))
            where = f"mcp-streams {' '.join(above)}".strip()
            raise CannotConfigure(f"{path}: {key} is no setting of {where}{nearest}")


def _names(arguments: Any) -> set[str]:
    """The names of the options and arguments of a command, without dashes before them."""
    parsed = [argument for argument in arguments if argument.parse]
    return {name.lstrip("-").lower() for argument in parsed for name in argument.names}
