"""`mcp-streams wrap`."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter

from streams.cli.base import complain
from streams.cli.options import (
    FLAT,
    KEEP,
    LISTEN,
    NO_AUTH,
    PATIENCE,
    WEBHOOKS,
    KeepOptions,
    ListenOptions,
    PatienceOptions,
    Seconds,
    file_of,
    parts,
    run,
)
from streams.process.options import (
    Auth,
    CannotServe,
    Command,
    Isolation,
    Options,
    Restart,
    Stderr,
    Webhooks,
)

BEHIND: Final = "write the command behind --: mcp-streams wrap [OPTIONS] -- npx -y some-server"


@dataclass(frozen=True, kw_only=True)
class Child:
    """How the command is run.

    Parameters
    ----------
    isolate
        A child process for each client session ("session"), one for all ("none"), or one for each
        call ("call").
    children_max
        How many child processes may run; idle ones are ended first.
    child_idle
        Seconds after which a child without a client and a call is ended.
    restart
        When a child that has ended is started again.
    rerun
        Tools whose interrupted calls are sent again to the new child, as globs, or "hinted" for
        those that say that they are read-only or idempotent. By default none.
    env
        NAME=VALUE, a variable for the command, besides those of this process. Other users can see
        a command line: give secrets as variables of the host.
    cwd
        The folder that the command runs in; by default the current one.
    start_timeout
        Seconds within which a child must have answered "initialize"; with --check, all lists too.
    stop_timeout
        Seconds between the end of a child's input, SIGTERM and SIGKILL.
    stderr
        Where the command's standard error goes.
    """

    isolate: Isolation = "session"
    children_max: int = 32
    child_idle: Seconds = 600.0
    restart: Restart = "on-failure"
    rerun: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    cwd: Path | None = None
    start_timeout: Seconds = 30.0
    stop_timeout: Seconds = 5.0
    stderr: Stderr = "log"

    def command(self, words: Sequence[str]) -> Command:
        """The command as the process runs it. Raises `ValueError`, which says what is wrong."""
        if self.children_max < 1:
            raise ValueError("--children-max: write a number above 0.")
        for name in ("child_idle", "start_timeout", "stop_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')}: write seconds, more than 0.")
        cwd = Path(self.cwd or ".").resolve()
        if not os.path.isdir(cwd):  # unlike `Path.is_dir`, it takes too long a name
            raise ValueError(f"--cwd: there is no folder {cwd}.")
        env = _variables(self.env)
        _check_program(words[0], cwd, os.environ | env)
        return Command(
            words=tuple(words),
            cwd=str(cwd),
            env=env,
            isolate=self.isolate,
            children_max=self.children_max,
            child_idle_s=self.child_idle,
            restart=self.restart,
            rerun=parts(self.rerun, "--rerun"),
            start_timeout_s=self.start_timeout,
            stop_timeout_s=self.stop_timeout,
            stderr=self.stderr,
        )


ALONE: Final = Child()


def wrap(
    *command: str,
    listen: Annotated[ListenOptions, FLAT] = LISTEN,
    journal: str | None = None,
    name: str | None = None,
    child: Annotated[Child, Parameter(name="*")] = ALONE,
    hosts: Annotated[PatienceOptions, FLAT] = PATIENCE,
    check: bool = False,
    keep: Annotated[KeepOptions, FLAT] = KEEP,
    auth: Annotated[Auth, FLAT] = NO_AUTH,
    webhooks: Annotated[Webhooks, FLAT] = WEBHOOKS,
) -> int:
    """Make the calls of any stdio server resumable: mcp-streams wrap -- npx -y some-server.

    Without --http and --ws it serves the client that has started it, over stdio. The command then
    runs under an owner: a process that is started if none runs, and that survives the client.

    Parameters
    ----------
    command
        The program and its arguments, behind "--".
    journal
        The SQLite file that keeps the streams. By default a file of this command, folder and
        environment, in $XDG_STATE_HOME/mcp-streams or ~/.local/state/mcp-streams.
    name
        The name of that file; by default that of the command.
    check
        Start the command, initialize, list what it has, stop it, and print what was found, with
        --json as JSON. The exit code is 1 if that failed.
    """
    if not command:
        return complain(f"wrap: no command: {BEHIND}.")
    if command[0] in sys.argv and "--" not in sys.argv:  # else a file of settings names it
        return complain(f"wrap: {BEHIND}.")
    try:
        patience = hosts.settings("timeout")
        wrapped = child.command(command)
        options = keep.options(
            app=wrapped,
            journal=file_of(journal),
            patience=patience,
            auth=auth,
            webhooks=webhooks,
            **listen.options(),
        )
        return _check(options) if check else run(placed(options, name))
    except (ValueError, CannotServe) as error:
        return complain(error)


def _check(options: Options) -> int:
    from streams.cli.actions import check
    from streams.process.loading import load

    assert isinstance(options.app, Command)
    timeout_s = options.app.start_timeout_s
    return check.run(lambda: load(options), timeout_s, as_json=options.json_log)


def placed(options: Options, name: str | None) -> Options:
    """The options with the digest of the environment, and with a journal where none was named.

    Raises `CannotServe`.
    """
    from streams.process import state

    command = options.app
    assert isinstance(command, Command)
    return state.placed(
        options,
        name or state.name_of_command(command.words),
        command.words,
        command.cwd,
        command.isolate,
        state.environment_of_command(os.environ | command.env),
    )


def _check_program(program: str, cwd: Path, environment: Mapping[str, str]) -> None:
    """Raise `ValueError` where there is no such program to start in this folder."""
    path = str(cwd / program) if "/" in program else program
    if shutil.which(path, path=environment.get("PATH")) is None:
        where = f"{path} is no program" if "/" in program else f"PATH has no program {program}"
        raise ValueError(f"wrap: {where}: install it, or write its path behind --.")


def _variables(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for each in given:
        name, separator, value = each.partition("=")
        if not separator or not name:
            raise ValueError("--env: write NAME=VALUE.")
        found[name] = value
    return found
