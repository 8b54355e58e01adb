"""Watches what goes over the server's end of every connection: the newest wins, and is told of.

Whoever asks for a stream has a claim on it, and the newest claim that was served is the only one
that may be served from then on.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from streams.keys import Keyring
from streams.messages import Incoming
from tests.simulation.ledger import Ledger
from tests.simulation.network import FarChannel
from tests.simulation.world import World

RESUMES: Final = ("stream/resume", "requests/resume")
_Claim = tuple[int, FarChannel]


class Witness:
    """Of all servers, one after the other."""

    def __init__(self, world: World, ledger: Ledger, keyring: Keyring) -> None:
        self._world = world
        self._ledger = ledger
        self._keyring = keyring
        self._numbers = itertools.count(1)
        self._claims: dict[str, list[_Claim]] = {}  # on each job, in the order of their arrival
        self._served: dict[str, _Claim] = {}
        self._asked: dict[tuple[FarChannel, Any], tuple[str, int]] = {}  # by a request's id

    def heard(self, channel: FarChannel, received: Sequence[Incoming]) -> None:
        """A server is given these lines."""
        for line in received:
            if isinstance(line, bytes) and (b'"tools/call"' in line or b'/resume"' in line):
                self._claim(channel, msgspec.json.decode(line))

    def _claim(self, channel: FarChannel, said: dict[str, Any]) -> None:
        params = said["params"]
        is_resume = said["method"] in RESUMES
        key = self._key_of(params) if is_resume else params["arguments"]["job"]
        if key is not None:
            claim = (next(self._numbers), channel)
            self._claims.setdefault(key, []).append(claim)
            self._asked[channel, said["id"]] = (key, claim[0])

    def _key_of(self, params: dict[str, Any]) -> str | None:
        for stream, known in self._ledger.known.items():
            is_named = params.get("streamId") == stream
            if is_named or params["resumeToken"] == self._keyring.token(stream):
                return known.job.key
        return None

    def said(self, channel: FarChannel, written: bytes) -> None:
        """A server writes this."""
        if b"notifications/stream/position" in written:
            lines = written.splitlines()
            for header in (line for line in lines if b"notifications/stream/position" in line):
                params = msgspec.json.decode(header)["params"]
                known = self._ledger.known.get(params["streamId"])
                if known is not None:
                    self._serve(known.job.key, channel)
        if b'"superseded"' in written:
            for line in written.splitlines():
                if b'"superseded"' in line:
                    self._supersede(channel, msgspec.json.decode(line)["id"])

    def _serve(self, key: str, channel: FarChannel) -> None:
        number, served = self._served.get(key, (0, None))
        if served is channel:
            return
        claims = [claim for claim in self._claims.get(key, ()) if claim[1] is channel]
        newer = [claim for claim in claims if claim[0] > number]
        if self._world.expect(newer, f"{key} is sent to who was displaced, or never asked"):
            self._served[key] = newer[-1]

    def _supersede(self, channel: FarChannel, id: Any) -> None:
        key, number = self._asked.get((channel, id), ("", 0))
        self._world.counts["told superseded"] += 1
        is_newer = any(claim[0] > number for claim in self._claims.get(key, ()))
        self._world.expect(is_newer, f"{key}: told to be superseded, and nobody came later")
