"""The warning of a relay whose options are not those of its owner."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import fields, replace

from streams.process import differences
from streams.process.differences import settings, warning
from streams.process.options import Command, Options, Patience, Remote, Webhooks

COMMAND = Options(app=Command(words=("run",), cwd="/"), journal=Path("/j.db"), stdio=True)
REMOTE = Options(app=Remote(url="http://h/"), journal=Path("/j.db"), stdio=True)


def told(ours: Options, theirs: Options) -> str | None:
    """The warning of a relay whose owner was started with `theirs`."""
    return warning(settings(ours), settings(Options.parse(theirs.for_owner())), 17)


@pytest.mark.parametrize(
    "options",
    [
        COMMAND,
        REMOTE,
        replace(COMMAND, app="file.py:server"),
        replace(
            COMMAND,
            linger_s=0.5,
            patience=Patience(patience_s=50, once=("a*", "hinted")),
            limits={"journal_bytes_max": 20_000_000_000, "streams_per_principal_max": 3},
        ),
    ],
)
def test_the_owner_that_a_relay_has_started_has_its_options(options: Options) -> None:
    assert told(options, options) is None


@pytest.mark.parametrize(
    ("member", "changed", "name"),
    [
        ("app", {"restart": "never"}, "--restart on-failure (here: never)"),
        ("app", {"rerun": ("do", "hinted")}, "--rerun none (here: do,hinted)"),
        ("app", {"child_idle_s": 1.5}, "--child-idle 600 (here: 1.5)"),
        ("app", {"children_max": 3}, "--children-max 32 (here: 3)"),
        ("app", {"start_timeout_s": 1.0}, "--start-timeout 30 (here: 1)"),
        ("app", {"stop_timeout_s": 1.0}, "--stop-timeout 5 (here: 1)"),
        ("app", {"stderr": "null"}, "--stderr log (here: null)"),
        ("patience", {"patience_s": 50.0}, "--patience none (here: 50)"),
        ("patience", {"once": ("x" * 99,)}, f"(here: {'x' * 59}"),
        ("patience", {"keep_cancelled": "always"}, "--keep-cancelled never (here: always)"),
        (
            "",
            {"limits": {"message_bytes_max": 5000}},
            "--limit none (here: message_bytes_max=5000)",
        ),
        ("", {"durability": "process"}, "--durability power (here: process)"),
        ("", {"linger_s": 60.0}, "--linger 5 (here: 60)"),
        ("", {"watchdog_s": 0.0}, "--watchdog 1 (here: 0)"),
        ("", {"require_resume_token": True}, "--require-resume-token off (here: on)"),
        ("", {"json_log": True}, "--json off (here: on)"),
        (
            "",
            {"webhooks": Webhooks(webhook=("https://hooks.example/SECRET",))},
            "--webhook none (here: hooks.example)",
        ),
    ],
)
def test_an_option_of_its_own_is_named(member: str, changed: dict[str, Any], name: str) -> None:
    part = replace(getattr(COMMAND, member), **changed) if member else None
    ours = replace(COMMAND, **(changed if part is None else {member: part}))
    said = told(ours, COMMAND)
    assert said is not None
    assert name in said
    assert "kill 17" in said
    assert said.count("(here: ") == 1


@pytest.mark.parametrize(
    "changed",
    [{"give_up_s": 3.0}, {"rerun": ("a",)}, {"offline_start": False}],
)
def test_so_are_those_of_attach(changed: dict[str, Any]) -> None:
    assert isinstance(REMOTE.app, Remote)
    assert told(replace(REMOTE, app=replace(REMOTE.app, **changed)), REMOTE)


@pytest.mark.parametrize(
    ("kind", "compared", "others"),
    [
        (Command, differences.OF_COMMAND, {"words", "cwd", "env", "isolate"}),  # in the key
        (Remote, differences.OF_REMOTE, {"url", "token_file", "headers"}),  # in the key
        (Patience, differences.OF_PATIENCE, set()),
        (
            Options,
            differences.OF_OPTIONS,
            # Agreed upon in the hello; compared by their members; of an owner that listens.
            {
                "app",
                "key",
                "journal",
                "store",
                "beside",
                "stdio",
                "foreground",
                "patience",
                "limits",
                "webhooks",
            }
            | {"ws", "http", "http_path", "tls_cert", "tls_key", "insecure_anonymous", "auth"}
            | {"allowed_hosts", "allowed_origins"},
        ),
    ],
)
def test_no_option_is_forgotten(kind: Any, compared: dict[str, str], others: set[str]) -> None:
    assert {field.name for field in fields(kind)} == set(compared.values()) | others


def test_no_option_of_webhooks_is_forgotten() -> None:
    """The URLs are compared by their hosts: their paths may be secrets."""
    names = {field.name for field in dataclasses.fields(Webhooks)}
    assert names == set(differences.OF_WEBHOOKS.values()) | {"webhook"}


def test_an_owner_has_whole_numbers_where_the_relay_has() -> None:
    """`islice` and its like take no 100.0."""
    limits = {"resident_max": 100, "journal_anonymous_share": 0.5}
    parsed = Options.parse(replace(COMMAND, limits=limits).for_owner()).limits
    assert {name: type(value) for name, value in parsed.items()} == {
        "resident_max": int,
        "journal_anonymous_share": float,
    }
