"""SIGKILL at any moment: messages that a client has, or that `flush()` has confirmed, are never
lost; and no call is run twice whose key says so.

`KILL_RUNS` sets the number of moments, over each transport in turn. In every second run the moment
is a step of the call, so that a failure can be repeated from its seed; in the others it is a time
between 1 ms and 2 s.
"""

import contextlib
import os
import random
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest

from tests.wire.process import Gate, ServerProcess, gate_in
from tests.wire.raw import Id, Message, Peer, PeerGone, method_is
from tests.wire.verbs import (
    COMPLETED,
    CREATE,
    END,
    KINDS,
    PLAIN,
    POSITIONS,
    STREAMS,
    Reader,
    Started,
    ack,
    counted,
    opting_in,
    read_stream,
    refused,
    resume,
    start,
    up_to,
)

KILL_RUNS = int(os.environ.get("KILL_RUNS", "10"))
KILLED_AFTER_S = (0.001, 2.0)
SHORT_KILLED_AFTER_S = (0.001, 0.5)
SHORT_PAUSES_S = (0.0, 0.004, 0.006, 0.008, 0.015)  # the record is stored after 5 to 10 ms
MESSAGES = 100
PER_SECOND = 500


class Run:
    """One server, one call, and the state that is known when the server is killed."""

    def __init__(self, folder: Path, seed: int) -> None:
        (folder / "server").mkdir()
        self.dice = random.Random(seed)
        self.kind = KINDS[seed % len(KINDS)]
        self.is_timed = seed % 2 == 1
        self.flush_every = self.dice.randint(1, 30)
        self.server = ServerProcess(folder / "server")
        self.acked = 0
        self.flushed = 0

    def work_until_killed(self, gate: Gate) -> tuple[Started, Reader]:
        """Call, go on up to a random moment, kill; returns the client's state by then."""
        with self.server.connect(self.kind) as peer:
            peer.initialize(opting_in(self.kind, POSITIONS))
            if self.is_timed:
                started, reader = self._go_on_for_a_time(peer, gate)
            else:
                started, reader = self._go_on_up_to_a_message(peer, gate)
            self.server.kill()
            reader.drain()
        return started, reader

    def _go_on_up_to_a_message(self, peer: Peer, gate: Gate) -> tuple[Started, Reader]:
        started = start(peer, "killed", n=MESSAGES, flush_every=self.flush_every, gate=gate.path)
        reader = Reader(peer)
        if self.dice.random() < 0.5:
            reader.until_seq(started.stream, self._seen_before_ack(reader, started))
        else:
            every = self.flush_every
            self.flushed = self.dice.randrange(every, MESSAGES + 1, every)
            gate.wait_for(f"flushed {self.flushed}")
        return started, reader

    def _go_on_for_a_time(self, peer: Peer, gate: Gate) -> tuple[Started, Reader]:
        after_s = self.dice.uniform(*KILLED_AFTER_S)
        started = start(
            peer, "steady", per_second=PER_SECOND, flush_every=self.flush_every, gate=gate.path
        )
        reader = Reader(peer)
        killer = threading.Timer(after_s, self.server.send, (signal.SIGKILL,))
        killer.start()
        with contextlib.suppress(PeerGone):
            while True:
                seen = max(reader.seqs(started.stream), default=0)
                reader.until_seq(started.stream, seen + self.dice.randint(1, MESSAGES))
                if self.dice.random() < 0.5:
                    self.acked = max(reader.seqs(started.stream))
                    ack(peer, started.stream, self.acked)
        killer.join()
        return started, reader

    def _seen_before_ack(self, reader: Reader, started: Started) -> int:
        seen = self.dice.randint(1, MESSAGES)
        if self.dice.random() < 0.5:
            self.acked = self.dice.randint(1, seen)
            reader.until_seq(started.stream, self.acked)
            ack(reader.peer, started.stream, self.acked)
        return seen

    def confirmed(self, gate: Gate) -> int:
        """The highest number for which `flush()` had returned."""
        marks = [int(mark.split()[1]) for mark in gate.marks() if mark.startswith("flushed ")]
        return max([self.flushed, *marks])


class Short:
    """One short call, and all that its client was told of it."""

    def __init__(self, number: int, dice: random.Random, runs: Path) -> None:
        self.name = f"call-{number}"
        self.is_reading = dice.random() < 0.5
        self.key = f"the key of {self.name}".ljust(40, ".") if dice.random() < 0.6 else None
        pause_s = dice.choice(SHORT_PAUSES_S)
        self.params = {
            "name": "short_reading" if self.is_reading else "short",
            "arguments": {"name": self.name, "pause_s": pause_s, "runs": str(runs)},
            "_meta": {} if self.key is None else {"mcp-streams/idempotencyKey": self.key},
        }
        self.id: Id | None = None
        self.announced: Started | None = None
        self.is_answered = False

    def make(self, peer: Peer) -> None:
        """Make the call and wait for the answer. Raises `PeerGone`."""
        self.id = peer.request("tools/call", self.params)
        while not self.is_answered:
            message = peer.receive()
            if message.method == CREATE and (stream := message.params["stream"]):
                self.announced = Started(self.id, stream["streamId"], stream["resumeToken"])
            elif message.answers(self.id):
                self.check(message)

    def check(self, answer: Message) -> None:
        """Check an answer, which may say that the call was interrupted by the kill."""
        self.is_answered = True
        if "error" in answer:
            refused(answer, "interrupted", -32603)
        else:
            assert answer.result["content"][0]["text"] == self.name

    def come_back(self, peer: Peer) -> None:
        """Find the call again, if its client knows how."""
        if self.announced is not None:
            messages = resume(peer, self.announced.with_token)
            [answer] = [each for each in messages if each.answers(self.announced.id)]
            self.check(answer)
        elif self.key is not None:
            self.check(peer.response(peer.request("tools/call", self.params)))


@pytest.mark.parametrize("seed", range(KILL_RUNS))
def test_a_short_call_is_answered_or_found_again_and_not_run_twice(
    tmp_path: Path, seed: int
) -> None:
    """A client that was told how to come back, or has a key, finds its call. A tool without hints
    is not run twice for one key, whenever the server is killed."""
    (tmp_path / "server").mkdir()
    dice, kind, runs = random.Random(seed), KINDS[seed % len(KINDS)], tmp_path / "runs"
    runs.touch()
    calls: list[Short] = []
    with ServerProcess(tmp_path / "server") as server:
        with server.connect(kind) as peer:
            peer.initialize(opting_in(kind, dice.choice([PLAIN, STREAMS, POSITIONS])))
            after_s = dice.uniform(*SHORT_KILLED_AFTER_S)
            killer = threading.Timer(after_s, server.send, (signal.SIGKILL,))
            killer.start()
            with contextlib.suppress(PeerGone):
                while True:
                    calls.append(Short(len(calls), dice, runs))
                    calls[-1].make(peer)
            killer.join()
        server.restart()
        with server.connect(kind) as peer:
            peer.initialize(opting_in(kind, STREAMS))
            calls[-1].come_back(peer)
    noted = Counter(runs.read_text().split())
    for call in calls:
        assert call.is_answered or call is calls[-1]
        assert noted[call.name] <= (2 if call.is_reading and call.key else 1)
        assert noted[call.name] or call is calls[-1]


def numbers_of(entries: dict[int, Message]) -> dict[int, int]:
    """seq → the tool's own number, of the entries that have one."""
    return {seq: n for seq, entry in entries.items() for n in counted([entry])}


@pytest.mark.parametrize("seed", range(KILL_RUNS))
def test_nothing_that_was_told_is_taken_back(tmp_path: Path, seed: int) -> None:
    """W§1: entries are "numbered `seq` = 1, 2, 3 … without gaps, stored in the journal before they
    are sent, kept until the client is known to have them"; W§9: `interrupted`, "final response of a
    call whose handler died with the server"."""
    run = Run(tmp_path, seed)
    with gate_in(tmp_path / "gate") as gate, run.server:
        started, before = run.work_until_killed(gate)
        had = max(before.seqs(started.stream), default=0)
        told = max(had, run.confirmed(gate))
        run.server.start()
        cursor = run.dice.randint(run.acked, had)
        if run.dice.random() < 0.3:
            kill_again_while_resuming(run, started, cursor)
        with run.server.connect(run.kind) as peer:
            peer.initialize(opting_in(run.kind, POSITIONS))
            after, reply = read_stream(peer, started.with_token, after=cursor)
    entries = after.entries[started.stream]
    last = max(entries)
    assert list(entries) == list(range(cursor + 1, last + 1)), "no gaps, no duplicates"
    assert last > told, "nothing that was told is missing, and numbers go on"
    assert entries[last].answers(started.id)
    refused(entries[last], "interrupted", -32603)
    assert numbers_of(entries) == {seq: seq for seq in range(cursor + 1, last)}
    both = before.entries.get(started.stream, {}).keys() & entries.keys()
    assert all(before.entries[started.stream][seq].raw == entries[seq].raw for seq in both)
    assert after.others[-2].method == END
    assert reply.result == COMPLETED


def kill_again_while_resuming(run: Run, started: Started, cursor: int) -> None:
    """The first delivery after the restart is cut by another SIGKILL."""
    with run.server.connect(run.kind) as peer:
        peer.initialize(opting_in(run.kind, POSITIONS))
        peer.request("stream/resume", {**started.with_token, "after": cursor})
        Reader(peer).until_seq(started.stream, cursor + 1)
        run.server.restart()


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_call_stays_finished(fresh: ServerProcess, gate: Gate, kind: str) -> None:
    """W§1: stored "before they are sent": a client that has read the final response finds the same
    one after the kill, and no `interrupted`."""
    with fresh.connect(kind) as peer:
        peer.initialize(opting_in(kind, POSITIONS))
        gate.release()
        started = start(peer, "killed", n=MESSAGES, flush_every=7, gate=gate.path)
        before = Reader(peer)
        before.until(method_is(END))
        fresh.restart()
    with fresh.connect(kind) as peer:
        peer.initialize(opting_in(kind, POSITIONS))
        after, reply = read_stream(peer, started.with_token, after=0)
    assert after.seqs(started.stream) == up_to(MESSAGES + 1)
    of_both = [reader.entries[started.stream] for reader in (before, after)]
    assert [one.raw for one in of_both[0].values()] == [one.raw for one in of_both[1].values()]
    assert reply.result == COMPLETED


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_without_positions_misses_nothing(
    fresh: ServerProcess, gate: Gate, kind: str
) -> None:
    """W§4: "a plain client may see a message twice, never miss one", across a kill too."""
    with fresh.connect(kind) as peer:
        peer.initialize(opting_in(kind, {"streams": {}}))
        started = start(peer, "killed", n=MESSAGES, flush_every=10, gate=gate.path)
        gate.wait_for("flushed 50")
        fresh.kill()
    fresh.start()
    with fresh.connect(kind) as peer:
        peer.initialize(opting_in(kind, {"streams": {}}))
        messages = resume(peer, started.with_token)
    numbers = counted(messages)
    assert numbers == up_to(len(numbers))
    assert len(numbers) >= 50
    refused(messages[-3], "interrupted", -32603)
    assert messages[-3].answers(started.id)


def test_every_stream_of_many_survives(fresh: ServerProcess, gate: Gate) -> None:
    """W§9: each call whose handler died ends with its own `interrupted`, under its own id."""
    with fresh.connect("ws-streams") as peer:
        peer.initialize(POSITIONS)
        started = [start(peer, "killed", n=20, flush_every=20, gate=gate.path) for _ in range(50)]
        for _ in started:
            gate.wait_for("sent")
        fresh.restart()
    with fresh.connect("ws-streams") as peer:
        peer.initialize(POSITIONS)
        for one in started:
            reader, reply = read_stream(peer, one.with_token, after=5)
            assert reader.seqs(one.stream) == list(range(6, 22))
            assert reader.entries[one.stream][21].answers(one.id)
            refused(reader.entries[one.stream][21], "interrupted", -32603)
            assert reply.result == COMPLETED
