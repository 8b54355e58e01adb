"""Tells webhooks of the questions of one stream that no client is there to answer.

A question that is asked while no client is attached is told at once, together with its line. If its
client leaves without an answer, it is told after `RETURN_S`: most clients come back sooner, as
after a cut connection or a restart of the server, and then have the question.

The webhook is in the journal during that time, so a crash does not lose it. It is taken back if the
client returns, or if the question is over. Each question is told once. After a crash it may be told
again, with the same id.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import trio

from streams.engine.hooks import Hooks
from streams.engine.lifecycle import Question
from streams.journal.records import Record
from streams.journal.webhooks import WebhookChange

RETURN_S: Final = 10.0


class Absence:
    """The questions of one stream that were told. A question is known by its seq."""

    __slots__ = ("_commit", "_hooks", "_sent_at")

    def __init__(self, hooks: Hooks, commit: Callable[[WebhookChange], None]) -> None:
        self._hooks = hooks
        self._commit = commit
        self._sent_at: dict[int, float] = {}  # in trio's time

    def asked(self, questions: Iterable[Question]) -> Sequence[Question]:
        """Those that were not told. The caller tells them now."""
        return self._told(questions, trio.current_time())

    def left(self, record: Record, questions: Iterable[Question]) -> None:
        """The client has left, or the server was killed: tell these, unless a client returns."""
        told = self._told(questions, trio.current_time() + RETURN_S)
        self._add(self._hooks.left(record, told, RETURN_S) if told else ())

    def restarted(self, questions: Iterable[Question]) -> None:
        """The process before has told these, not long ago perhaps."""
        self._told(questions, trio.current_time() + RETURN_S)

    def returned(self, record: Record) -> None:
        """A client is attached: take back what is not sent yet."""
        for seq in list(self._sent_at):
            self._take_back(record, seq, is_over=False)

    def over(self, record: Record, seq: int | None = None) -> None:
        """This question, or each of them, wants no answer any more."""
        for each in list(self._sent_at) if seq is None else [seq]:
            self._take_back(record, each, is_over=True)

    def _told(self, questions: Iterable[Question], at: float) -> Sequence[Question]:
        told = [each for each in questions if each.seq not in self._sent_at]
        self._sent_at.update((each.seq, at) for each in told)
        return told

    def _take_back(self, record: Record, seq: int, *, is_over: bool) -> None:
        sent_at = self._sent_at.get(seq)
        if sent_at is None:
            return
        is_waiting = trio.current_time() < sent_at
        if is_waiting:
            self._add(self._hooks.taken_back(record, seq))
        if is_waiting or is_over:
            del self._sent_at[seq]

    def _add(self, changes: Iterable[WebhookChange]) -> None:
        for change in changes:
            self._commit(change)
