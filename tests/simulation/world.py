"""The true state of one simulated world, apart from its participants' views, and the first
violation.

The journal, the clients and the tools report events to it; each report is checked against the
rules. The first violation ends the simulation.
"""

import random
import zlib
from collections import Counter, deque
from typing import Any, Final

import trio

from tests.simulation.plan import BRIEF_S, LONG_S, Part, Plan

PROMPT_S: Final = 3.0  # until a reader has a durable message, where no fault occurs
TRACE_LINES: Final = 2_000  # that are kept where not all of them are printed


class Job:
    """One call as all sides together know it."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.key = part.key
        self.stream: str | None = None  # its id, once the journal has it
        # The tool's actions, in the process that is alive.
        self.runs = 0
        self.said = 0  # log messages that were accepted
        self.flushed = 0  # that no crash may take back
        self.reported = 0
        self.answers = 0
        # Received by its callers:
        self.handed = 0  # the highest seq
        self.heard = 0  # log messages
        self.asked = 0
        self.progress = 0
        self.outcome = ""  # how it ended for the caller
        self.is_settled = trio.Event()  # its callers are done, the displaced ones too
        # Reasons for an end other than its result.
        self.is_cancelled = False
        self.was_interrupted = False  # a server died, or stopped, before its end was durable
        self.durable_at: dict[int, float] = {}  # by seq, where replicas share a journal
        self.has_lost = False  # the store has lost some of its messages, or its record
        self.lost: list[tuple[int, int]] = []  # the first and last of numbers that no message has
        self.has_gap = False  # and its caller goes on behind some of these
        self.has_ticket = False  # its caller was told how to resume
        # Its requests, as its servers see them:
        self.requests = 0  # that have arrived
        self.open_requests = 0  # that have no answer
        self.has_key = False
        self.channel: object = None  # the server's end of the connection of the last one
        self.is_recorded = False  # its record is durable
        self.filed: str | None = None  # the stream of the record that the journal was given
        self.fate_is_due = trio.Event()

    @property
    def max_s(self) -> float:
        """How long its caller may stay away."""
        return BRIEF_S if self.part.tool == "brief" else LONG_S

    @property
    def is_resumable(self) -> bool:
        """Whether its client knows how to come back."""
        return bool(self.part.dialects) or self.has_key or not self.part.is_plain

    def text_of(self, run: int) -> str:
        """The text of the result of a run of its tool."""
        return f"{self.key}: {self.part.said} said, {self.part.asked} asked, run {run}"

    @property
    def texts(self) -> list[str]:
        """The results that there may be."""
        return [self.text_of(run) for run in range(1, self.runs + 1)]

    def state(self, step: int) -> dict[str, int]:
        """The state that its tool keeps after this step."""
        counted = {"said": self.said, "reported": self.reported, "answers": self.answers}
        return {"step": step, **counted}

    def restore(self, state: dict[str, int] | None) -> int:
        """Go back to the state from which its tool restarts; returns the step."""
        state = state or {"step": 0, "said": 0, "reported": 0, "answers": 0}
        self.said, self.reported = state["said"], state["reported"]
        self.answers = state["answers"]
        return state["step"]

    def begin_anew(self) -> None:
        """Start from nothing: the journal forgot the call, and a client repeats it by its key."""
        self.stream = self.filed = None
        self.is_recorded = False
        self.runs = self.said = self.flushed = self.reported = self.answers = 0

    def saying(self, number: int) -> dict[str, Any]:
        """The text of its log message of this number."""
        size = zlib.crc32(f"{self.key}/{number}".encode()) % 60
        return {"job": self.key, "number": number, "padding": "." * size}

    def end(self, outcome: str) -> None:
        """Its callers are done with it."""
        self.outcome = outcome


class World:
    """One seed's."""

    def __init__(self, plan: Plan, chance: random.Random, *, is_traced: bool) -> None:
        self.plan = plan
        self.chance = chance
        self.jobs = {part.key: Job(part) for part in plan.parts}
        self.violations: list[str] = []
        self.is_broken = trio.Event()
        self.error: BaseException | None = None  # not expected by any rule
        self.counts: Counter[str] = Counter()
        self.is_calm = False  # no fault occurs any more
        self.faults = 0  # that occur now
        # When the last fault has no effect any more: on all, or on the client of this name.
        self.quiet_at: dict[str, float] = {"": 0.0}
        self.lasted_s = 0.0
        self.digest = 0  # of all events
        self.trace: deque[str] = deque(maxlen=TRACE_LINES)
        self._is_traced = is_traced

    def note(self, who: str, what: str) -> None:
        """Keep an event for the trace."""
        line = f"{trio.current_time():10.3f}  {who:14} {what}"
        self.digest = zlib.crc32(line.encode(), self.digest)
        self.trace.append(line)
        if self._is_traced:
            print(line, flush=True)

    def violate(self, what: str) -> None:
        """Record a violation."""
        self.note("VIOLATION", what)
        self.violations.append(what)
        self.is_broken.set()

    def expect(self, is_so: object, what: str) -> bool:
        """Record a violation unless this holds."""
        if not is_so:
            self.violate(what)
        return bool(is_so)

    def disturb(self, for_s: float, client: str = "") -> None:
        """A fault has effects for so long: messages may be late."""
        until = trio.current_time() + for_s
        self.quiet_at[client] = max(self.quiet_at.get(client, 0.0), until)

    def received(self, job: Job, seq: int, client: str, waited_since: float) -> None:
        """A client has a message for which it waited."""
        durable_at = job.durable_at.get(seq)
        if durable_at is not None and not self.faults:
            quiet_at = max(self.quiet_at[""], self.quiet_at.get(client, 0.0))
            late_s = trio.current_time() - max(durable_at, waited_since, quiet_at)
            self.expect(late_s <= PROMPT_S, f"{job.key}: {seq} comes {late_s:.1f} s late")

    def reach(self, job: Job, moment: str) -> None:
        """A call has come to a moment at which a fault may be due."""
        if job.part.fate is not None and job.part.fate.moment == moment:
            job.fate_is_due.set()

    # Reports of the tools

    def started(self, job: Job) -> None:
        """A tool has begun to work on a job.

        It is run again after its server has died, if its record was durable. The tool of a short
        call is also run again for another request, if its annotations allow that.
        """
        job.runs += 1
        self.counts["short calls run"] += job.part.is_short
        is_again = job.part.is_repeatable and job.runs <= job.requests
        is_restarted = job.part.is_lasting and job.is_recorded
        is_fine = job.runs == 1 or is_restarted or is_again
        self.expect(is_fine, f"{job.key} is run {job.runs} times")
        is_safe = job.is_recorded or job.part.is_repeatable or not job.has_key
        self.expect(is_safe, f"{job.key} has a key, and is run before its record is durable")

    # Reports of the callers

    def handed(self, job: Job, seq: int) -> None:
        """A caller has all messages up to this number."""
        self.counts["messages"] += seq > job.handed
        job.handed = max(job.handed, seq)

    def heard(self, job: Job, method: str, params: dict[str, Any]) -> None:
        """A caller was given the next message of a job."""
        match method:
            case "notifications/message":
                job.heard = max(job.heard, job.has_gap and params["data"]["number"] - 1) + 1
                expected = job.saying(job.heard)
                self.expect(
                    params["data"] == expected, f"{job.key}: {expected} expected, heard {params}"
                )
            case "notifications/progress":
                grown = job.progress < params["progress"] <= 1_000
                self.expect(grown, f"{job.key}: progress {job.progress}, then {params}")
                job.progress = params["progress"]
            case "elicitation/create":
                job.asked = max(job.asked, job.has_gap and params["question"] - 1) + 1
                self.expect(
                    params == {"job": job.key, "question": job.asked},
                    f"{job.key}: question {job.asked} expected, heard {params}",
                )
            case _:
                self.violate(f"{job.key}: nobody has said {method} {params}")

    def finished(self, job: Job, result: dict[str, Any]) -> None:
        """A caller was given the result."""
        part = job.part
        said = result["content"][0]["text"]
        ended = "failed" if part.fails else "completed"
        self.expect(not job.outcome, f"{job.key}: ends twice: {job.outcome}, then {ended}")
        self.expect(said in job.texts, f"{job.key}: the result says {said!r}")
        self.expect(bool(result.get("isError")) == part.fails, f"{job.key}: {result}")
        is_whole = not job.has_gap
        was_heard, was_asked = job.heard == part.said, job.asked == part.asked
        self.expect(was_heard or not is_whole, f"{job.key}: {job.heard} of {part.said} were heard")
        self.expect(was_asked or not is_whole, f"{job.key}: {job.asked} of {part.asked} asked")
        self.expect(job.answers == part.asked, f"{job.key}: {job.answers} of {part.asked} answers")
        self.note("caller", f"{job.key} is {ended}, {job.handed} in all")
        job.end(ended)

    def skipped(self, job: Job, first: int, last: int) -> None:
        """A caller was told that these messages are lost, and goes on behind them."""
        self.counts["gaps told"] += 1
        is_lost = any(lost[0] <= first and last <= lost[1] for lost in job.lost)
        self.expect(is_lost, f"{job.key}: {first} to {last} are said to be lost: {job.lost}")
        job.handed = max(job.handed, last)
        job.has_gap = True

    def refused(self, job: Job, reason: str) -> None:
        """A caller was told that no more messages will come."""
        is_known = job.has_ticket or job.has_key or not job.part.is_short
        is_restarted = job.part.is_lasting and is_known
        has_not_run = job.runs == 0 or job.part.is_repeatable
        is_crowded = self.plan.limits.streams_per_principal_max < 10
        is_behind_gap = job.has_gap and any(lost[1] == job.handed for lost in job.lost)
        is_fine = {
            "interrupted": job.was_interrupted and (job.has_lost or not is_restarted),
            "messages_gone": job.has_lost,
            "delivered": is_behind_gap,  # the response is lost as well, and the caller knows
            "abandoned": job.max_s == BRIEF_S or not job.has_ticket,
            # A tombstone lasts for a while only.
            "stream_not_found": job.max_s == BRIEF_S or job.has_lost,
            "cancelled": job.is_cancelled,
            "too_slow": job.part.tool == "strict",
            "too_many_streams": has_not_run and is_crowded,
            "busy": has_not_run,  # the journal was full: no new calls
            "draining": has_not_run,
            "The server is shutting down: try again later.": has_not_run,
            "unavailable": has_not_run,  # nor could it look such a call up
            "lost": not job.has_ticket or job.has_lost,
        }
        self.expect(is_fine.get(reason), f"{job.key}: ends as {reason!r}, with no reason to")
        self.expect(not job.outcome, f"{job.key}: ends twice: {job.outcome}, then {reason}")
        if reason in ("interrupted", "too_slow"):
            self.expect(
                job.heard >= job.flushed or job.has_lost,
                f"{job.key}: {job.flushed} were flushed, {job.heard} were heard",
            )
        self.note("caller", f"{job.key} ends as {reason}, {job.handed} in all")
        job.end(reason)
