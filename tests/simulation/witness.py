"""Watches the server's end of every connection: the newest reader wins, and the displaced one is
told; and what is written is durable.

A request for a stream is a claim on it. Once a claim was served, no older claim may be served.

The answer to a call may be a plain reply instead, of which nothing is durable, before and after.
Then nothing else of the call was written: neither how to come back, nor a message.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import trio

from streams.keys import Keyring
from streams.messages import Incoming
from streams.protocol.extension import KEY
from tests.simulation.ledger import Ledger
from tests.simulation.network import FarChannel
from tests.simulation.world import Job, World

RESUMES: Final = ("stream/resume", "requests/resume")
ANNOUNCEMENTS: Final = ("notifications/stream/create", "notifications/requests/resumePolicy")
POSITION: Final = "notifications/stream/position"
MESSAGES: Final = ("notifications/message", "notifications/progress", "elicitation/create")
IN_USE: Final = b"This id is in use"  # an answer to another request than the one with that id
TWIN: Final = b'"the twin of '  # the result of that other request
TOLD_S: Final = 60.0  # a displaced request must be answered with `superseded` within this time


class Claim:
    """One request for a stream.

    A connection may make several, one after the other: each is displaced, answered and cancelled by
    itself.
    """

    def __init__(self, number: int, key: str, channel: FarChannel, after: int | None) -> None:
        self.number = number  # in the order of arrival
        self.key = key  # the job's
        self.channel = channel
        self.position = after  # the last seq that was written; None where it is unknown
        self.is_call = False  # and no resume
        self.is_answered = False
        self.is_released = False  # by that answer: the client may resume
        # The client has cancelled it, and expects no answer. Messages on their way still go out,
        # and a call that has ended goes on.
        self.is_cancelled = False


class Witness:
    """The witness of all servers, one after the other."""

    def __init__(self, world: World, ledger: Ledger, keyring: Keyring) -> None:
        self._world = world
        self._ledger = ledger
        self._keyring = keyring
        self._tokens: dict[str, str] = {}  # of each stream
        self._numbers = itertools.count(1)
        self._claims: dict[str, list[Claim]] = {}  # on each job, in the order of their arrival
        self._served: dict[str, Claim] = {}
        self._keys: dict[FarChannel, dict[str, None]] = {}  # of the jobs that it was asked for
        self._asked: dict[tuple[FarChannel, Any], Claim] = {}  # by a request's id
        self._displaced: dict[Claim, float] = {}  # displaced since when, and not answered yet

    def heard(self, channel: FarChannel, received: Sequence[Incoming]) -> None:
        """The server receives these lines."""
        for line in received:
            if isinstance(line, bytes) and (b'"tools/call"' in line or b'/resume"' in line):
                self._claim(channel, msgspec.json.decode(line))
            elif isinstance(line, bytes) and b"notifications/cancelled" in line:
                self._cancel(channel, msgspec.json.decode(line)["params"]["requestId"])

    def _claim(self, channel: FarChannel, said: dict[str, Any]) -> None:
        params = said["params"]
        is_resume = said["method"] in RESUMES
        key = self._key_of(params) if is_resume else params["arguments"].get("job")
        if key is not None:
            claim = Claim(next(self._numbers), key, channel, params.get("after"))
            if not is_resume:
                claim.is_call = True
                self._called(self._world.jobs[key], params, channel)
            self._claims.setdefault(key, []).append(claim)
            self._asked[channel, said["id"]] = claim
            self._keys.setdefault(channel, {})[key] = None

    def _called(self, job: Job, params: dict[str, Any], channel: FarChannel) -> None:
        job.requests += 1
        job.open_requests += 1
        job.has_key |= KEY in params.get("_meta", {})
        job.channel = channel
        self._world.reach(job, "arrived")

    def _key_of(self, params: dict[str, Any]) -> str | None:
        for stream, known in self._ledger.known.items():
            is_named = params.get("streamId") == stream
            if is_named or params["resumeToken"] == self._token(stream):
                return known.job.key
        return None

    def _token(self, stream: str) -> str:
        if stream not in self._tokens:
            self._tokens[stream] = self._keyring.token(stream)
        return self._tokens[stream]

    def said(self, channel: FarChannel, written: bytes) -> None:
        """The server writes these lines."""
        for line in written.splitlines(keepends=True):
            said = msgspec.json.decode(line)
            method, params = said.get("method"), said.get("params", {})
            if method == POSITION:
                known = self._ledger.known.get(params["streamId"])
                if known is not None and self._serve(known.job.key, channel):
                    served = self._served[known.job.key]
                    served.position = params["seq"] + params["count"] - 1
            elif method in ANNOUNCEMENTS:
                self._announced(params.get("stream", params)["resumeToken"])
            elif method in MESSAGES:
                jobs = [self._world.jobs[key] for key in self._keys[channel]]
                is_durable = any(self._ledger.has(job, line) for job in jobs)
                self._world.expect(is_durable, f"{line!r} is sent, and is not durable")
            elif method is None and IN_USE not in line:
                self._answer(channel, said["id"], line)

    def _announced(self, token: str) -> None:
        key = self._key_of({"resumeToken": token})
        if key is not None:
            self._world.reach(self._world.jobs[key], "announced")
            return
        is_durable = any(self._token(stream) == token for stream in self._ledger.others)
        self._world.expect(is_durable, "a call is announced, and its record is not durable")

    def _serve(self, key: str, channel: FarChannel) -> bool:
        served, number = self._served.get(key), 0
        if served is not None:
            is_same = served.channel is channel
            if is_same and not (served.is_answered or served.is_cancelled):
                return True
            number = served.number if is_same else served.number + 1
            is_told = is_same or not (served.is_released and served.channel.is_ready)
            self._world.expect(is_told, f"{key}: released, and not superseded")
        waiting = [claim for claim in self._claims.get(key, ()) if not claim.is_answered]
        newer = [each for each in waiting if each.channel is channel and each.number >= number]
        is_asked = self._world.expect(
            newer, f"{key} is sent to a displaced reader, or one that never asked"
        )
        if is_asked:
            self._served[key] = newer[-1]
            for claim in waiting:
                if claim.number < newer[-1].number and not claim.is_cancelled:
                    self._displaced.setdefault(claim, trio.current_time())
        return is_asked

    def _answer(self, channel: FarChannel, id: Any, line: bytes) -> None:
        claim = self._asked.get((channel, id))
        key = "" if claim is None else claim.key
        if claim is not None:
            if claim.is_call and TWIN not in line:
                self._answer_call(claim, self._world.jobs[key], line)
            claim.is_answered = True
            claim.is_released = b'"released"' in line
            is_late = self._displaced.pop(claim, None) is not None and claim.is_released
            self._world.expect(not is_late, f"{key}: released, and not superseded")
            if b'"mcp-streams/ended":"completed"' in line:
                self._check_complete(claim)
        if b'"superseded"' in line:
            self._world.counts["told superseded"] += 1
            self._check_displaced(claim, key)

    def _check_displaced(self, claim: Claim | None, key: str) -> None:
        number = math.inf if claim is None else claim.number
        is_newer = any(other.number > number for other in self._claims.get(key, ()))
        self._world.expect(is_newer, f"{key}: told `superseded` without a newer reader")

    def _answer_call(self, claim: Claim, job: Job, line: bytes) -> None:
        is_first = not claim.is_answered
        job.open_requests -= is_first
        self._world.reach(job, "answered")
        if b'"result"' in line and not self._ledger.has(job, line):
            self._world.counts["plain replies"] += 1
            self._world.expect(is_first, f"{job.key}: {line!r} is a second answer")
            is_left = job.filed is not None and job.filed not in self._ledger.forgotten
            self._world.expect(not is_left, f"{job.key}: {line!r} is a plain reply, and recorded")

    def _check_complete(self, claim: Claim) -> None:
        known = self._ledger.known.get(self._world.jobs[claim.key].stream or "")
        if known is not None and claim.position is not None:
            has_all = known.has_ended and claim.position == known.last
            self._world.expect(has_all, f"{claim.key}: is complete, and lacks some")

    def _cancel(self, channel: FarChannel, id: Any) -> None:
        claim = self._asked.get((channel, id))
        if claim is not None:
            claim.is_cancelled = True
            self._displaced.pop(claim, None)

    def check(self) -> None:
        """Check that displaced claims were told, where their clients can be."""
        for claim, since in list(self._displaced.items()):
            if trio.current_time() - since > TOLD_S:
                del self._displaced[claim]
                self._world.expect(
                    not claim.channel.is_ready,
                    f"{claim.key}: a displaced reader was never told",
                )
