"""The states of a call, in one vocabulary for `calls`, `poll` and `cancel`."""

from typing import Literal

import msgspec

from streams.client.wire import Standing

State = Literal["running", "asking", "done", "failed", "gone", "unknown", "unreachable"]


class Finding(msgspec.Struct, frozen=True):
    """The status of a call: for programs, and in words."""

    state: State
    status: str


def in_words(standing: Standing) -> Finding:
    """A poll's answer in words."""
    if standing.status != "completed":
        if standing.has_request:
            return Finding("asking", "running, has a question for you")
        return Finding("running", "running")
    if standing.has_error:
        return Finding("failed", "failed, error waiting")
    if standing.pending_messages:
        return Finding("done", "done, result waiting")
    return Finding("gone", "gone (delivered)")
