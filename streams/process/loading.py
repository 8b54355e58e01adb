"""Makes the thing that a process serves: a Python object or a backend, as its options say."""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol

import msgspec

from streams.engine.events import Events
from streams.engine.hooks import Hooks
from streams.journal.contract import Journal
from streams.journal.ownership import hello_path
from streams.keys import Keyring
from streams.limits import Limits
from streams.logs import log
from streams.observe.tallies import ChildCounts
from streams.process.options import CannotServe, Command, Options, Remote
from streams.process.tokens import token_of
from streams.server.backend import Backend
from streams.server.handlers import tool_at
from streams.server.patience import PatienceSettings
from streams.server.running import RunningServer, open_backend
from streams.server.server import Server
from transports import dial

# The packages whose names a file of the user's should not have.
_OURS: Final = ("streams", "transports")


_SDK_ADVICE: Final = " Install the official SDK: pip install 'mcp-streams[sdk]'."

ToolAt = Callable[[FrameType], str | None]


class Servable(Protocol):
    """A process can serve it. A `Server` is one; `Hosted` makes one of a backend."""

    limits: Limits

    @property
    def scopes(self) -> Sequence[str]:
        """The scopes that its tools need."""

    def open(
        self,
        journal: Journal,
        keyring: Keyring,
        *,
        patience: PatienceSettings | None = None,
        events: Events | None = None,
        hooks: Hooks | None = None,
    ) -> AbstractAsyncContextManager[RunningServer]:
        """Take over the journal's streams and run it, for the length of a block."""


class Hosted:
    """A backend with the settings to serve it."""

    scopes: Sequence[str] = ()  # a backend does not say which of its tools need any

    def __init__(self, backend: Backend, limits: Limits, *, require_resume_token: bool) -> None:
        self._backend = backend
        # The name of the tool that runs in a frame, for a backend whose tools run in this process.
        self.tool_at: ToolAt = getattr(backend, "tool_at", _no_tool)
        # The numbers of its child processes, for a backend that has such.
        self.child_counts: ChildCounts | None = getattr(backend, "child_counts", None)
        self.limits = limits
        self._require_resume_token = require_resume_token

    def open(
        self,
        journal: Journal,
        keyring: Keyring,
        *,
        patience: PatienceSettings | None = None,
        events: Events | None = None,
        hooks: Hooks | None = None,
    ) -> AbstractAsyncContextManager[RunningServer]:
        """Take over the journal's streams and run the backend, for the length of a block."""
        return open_backend(
            self._backend,
            journal,
            keyring,
            self.limits,
            require_resume_token=self._require_resume_token,
            patience=patience,
            events=events,
            hooks=hooks,
        )


def _no_tool(frame: FrameType) -> str | None:
    return None


def load(options: Options, *, on_down: Callable[[], None] = lambda: None) -> Servable:
    """Make what the options name. `on_down` is called once it has failed for good.

    Raises `CannotServe`, which names the line if the author's code has failed.
    """
    app = options.app
    if isinstance(app, str) and isinstance(found := _object(app), Server):
        found.limits = msgspec.structs.replace(found.limits, **options.limits)
        found.require_resume_token |= options.require_resume_token
        return found
    limits = msgspec.structs.replace(Limits(), **options.limits)
    backend: Backend
    try:
        if isinstance(app, Command):
            backend = _of_command(app, limits, on_down)
        elif isinstance(app, Remote):
            backend = _of_remote(app, options.journal)
        else:
            backend = _of_sdk(app, found)
    except ValueError as error:
        raise CannotServe(f"{error}.") from error
    return Hosted(backend, limits, require_resume_token=options.require_resume_token)


def tool_namer(server: Servable) -> ToolAt:
    """Finds the name of the tool that runs in a frame."""
    return server.tool_at if isinstance(server, Hosted) else tool_at


def patience_of(options: Options) -> PatienceSettings:
    """The settings of the layer for hosts that give up."""
    return PatienceSettings(**msgspec.structs.asdict(options.patience))


# Backends are imported where they are used (PLC0415): each of them takes time to load.


def _of_command(command: Command, limits: Limits, on_down: Callable[[], None]) -> Backend:
    from streams.backends.child import ChildBackend, ChildSettings  # noqa: PLC0415

    given = msgspec.structs.asdict(command)
    words = given.pop("words")
    settings = ChildSettings(command=words, message_bytes_max=limits.message_bytes_max, **given)
    return ChildBackend(settings, on_down=on_down)


def _of_remote(remote: Remote, journal: Path | None) -> Backend:
    from streams.backends.remote import RemoteBackend, RemoteSettings  # noqa: PLC0415

    dialer = dial(
        remote.url,
        token=token_of(remote.token_file),
        headers=remote.headers,
        outlast_s=remote.give_up_s,
    )
    settings = RemoteSettings(
        url=remote.url,
        dial=dialer,
        give_up_s=remote.give_up_s,
        offline_start=remote.offline_start,
        hello_path=None if journal is None else hello_path(journal),
        rerun=remote.rerun,
    )
    return RemoteBackend(settings)


def _of_sdk(app: str, found: object) -> Backend:
    from streams.backends.sdk import SdkBackend, recognised  # noqa: PLC0415

    if not recognised(found):
        place, _, name = app.rpartition(":")
        raise CannotServe(f"{place} has no Server named {name!r}: make one, or name another.")
    try:
        return SdkBackend(found)
    except TypeError as error:
        raise CannotServe(f"{app}: {error}") from error


def _object(app: str) -> object:
    """The Python object named by `file.py:name` or `package.module:name`."""
    place, _, name = app.rpartition(":")
    if not place or not name:
        raise CannotServe(f"{app}: name the server as file.py:server or package.module:server.")
    sys.path.insert(0, os.getcwd())
    _warn_of_hidden({Path.cwd(), Path(place).resolve().parent})
    try:
        module = _import(place)
    except CannotServe:
        raise
    except Exception as error:
        advice = _SDK_ADVICE if getattr(error, "name", None) == "mcp" else ""
        raise CannotServe(f"{place} cannot be imported: {_described(error)}.{advice}") from error
    return getattr(module, name, None)


def _warn_of_hidden(folders: Iterable[Path]) -> None:
    """Warn of files beside the server that it cannot import, since ours have the same names."""
    for name in _OURS:
        ours = Path(str(importlib.import_module(name).__file__))
        for folder in folders:
            for file in (folder / f"{name}.py", folder / name / "__init__.py"):
                if file.is_file() and not file.samefile(ours):
                    log.warning(
                        "a file cannot be imported, since mcp-streams has a package of that name: "
                        "rename it",
                        file=str(file),
                    )


def _described(error: Exception) -> str:
    if isinstance(error, SyntaxError):  # its text names the line
        return f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    # A tool that is refused: the author looks for its line, and not for that of the check.
    others = [frame for frame in frames if not frame.filename.startswith(_our_folders())]
    frame = (others or frames)[-1]
    where = "" if frame.filename.startswith("<") else f" ({frame.filename}, line {frame.lineno})"
    return f"{type(error).__name__}: {error}{where}"


def _our_folders() -> tuple[str, ...]:
    modules = map(importlib.import_module, _OURS)
    return tuple(os.path.dirname(str(module.__file__)) + os.sep for module in modules)


def _import(place: str) -> Any:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place)
    if not path.is_file():
        raise CannotServe(f"{path}: there is no such file.")
    if path.stem in _OURS:
        raise CannotServe(f"{path}: mcp-streams has a package {path.stem}: rename the file.")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
