"""The differences between the options of a relay and those of the owner that serves it.

The options of an owner are those of the relay that has started it. A user who has changed them must
learn why the change does nothing. It is quick to load, because a relay loads it.
"""

import shlex
from collections.abc import Mapping
from typing import Any, Final

from streams.process.options import Command, Options, Remote

VALUE_LETTERS_MAX: Final = 60  # of a value that is told

# The members of `Options` and of what it has that the owner alone decides, by the options that
# users write. All others are agreed upon in the hello, or are no part of how clients are served.
OF_OPTIONS: Final = {
    "--linger": "linger_s",
    "--grace": "grace_s",
    "--standby": "standby_s",
    "--compact": "compact",
    "--watchdog": "watchdog_s",
    "--durability": "durability",
    "--lease": "lease_s",
    "--replicas-acked": "replicas_acked",
    "--key-file": "key_file",
    "--admin": "admin",
    "--admin-token-file": "admin_token_file",
    "--admin-write": "admin_write",
    "--require-resume-token": "require_resume_token",
    "--json": "json_log",
    "--log-level": "log_level",
    "--otel": "otel",
}
OF_PATIENCE: Final = {
    "--patience": "patience_s",
    "--once": "once",
    "--keep-cancelled": "keep_cancelled",
}
OF_WEBHOOKS: Final = {
    "--webhook-secret-file": "webhook_secret_file",
    "--webhook-allow": "webhook_allow",
    "--webhook-content": "webhook_content",
    "--webhook-private": "webhook_private",
}
OF_COMMAND: Final = {
    "--children-max": "children_max",
    "--child-idle": "child_idle_s",
    "--restart": "restart",
    "--rerun": "rerun",
    "--start-timeout": "start_timeout_s",
    "--stop-timeout": "stop_timeout_s",
    "--stderr": "stderr",
}
OF_REMOTE: Final = {
    "--give-up": "give_up_s",
    "--rerun": "rerun",
    "--offline-start": "offline_start",
}


def settings(options: Options) -> dict[str, str]:
    """The options that the owner decides, as text. None of them is a secret."""
    found = _read(options, OF_OPTIONS) | _read(options.patience, OF_PATIENCE)
    found |= _read(options.webhooks, OF_WEBHOOKS)
    found["--webhook"] = _text(options.webhooks.hosts)  # without paths, which may be secrets
    if isinstance(options.app, Command):
        found |= _read(options.app, OF_COMMAND)
    if isinstance(options.app, Remote):
        found |= _read(options.app, OF_REMOTE)
    limits = sorted(options.limits.items())
    return found | {"--limit": ",".join(f"{name}={_text(value)}" for name, value in limits)}


def warning(ours: Mapping[str, str], theirs: Mapping[str, Any], owner: int) -> str | None:
    """The warning of a relay with these options; None where the owner has the same."""
    differing = [
        f"{name} {_shown(theirs[name])} (here: {_shown(value)})"
        for name, value in ours.items()
        if name in theirs and theirs[name] != value
    ]
    if not differing:
        return None
    return (
        "The owner of this journal runs with other options, and its options count: "
        f"{', '.join(differing)}. They change when it has ended: `kill {owner}` ends it now, "
        "and its running calls."
    )


def _read(settings: object, members: Mapping[str, str]) -> dict[str, str]:
    return {option: _text(getattr(settings, member)) for option, member in members.items()}


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool) or value is None:
        return {True: "on", False: "off", None: ""}[value]
    return f"{value:.15g}" if isinstance(value, int | float) else str(value)


def _shown(value: object) -> str:
    text = str(value) or "none"
    short = text if len(text) <= VALUE_LETTERS_MAX else text[: VALUE_LETTERS_MAX - 1] + "…"
    return shlex.quote(short) if any(map(str.isspace, short)) else short
