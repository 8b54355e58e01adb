"""`verify`, `export` and `backup`: damage is found, what is readable is saved, a copy is whole."""

import json
import os
import random
import re
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from streams.cli import app
from streams.errors import JournalError
from streams.journal.ownership import key_path
from streams.journal.records import Ack, Append, Change, Close, Create, Evict, Outcome
from streams.journal.sessions import SaveGrant, SaveSession
from streams.journal.sqlite import SCHEMA_VERSION, SQLiteStore
from streams.journal.sqlite.backup import back_up, export_streams
from streams.journal.sqlite.export import MISSING_MAX, Lines
from streams.journal.sqlite.verify import inspect
from streams.keys import Keyring, hashed
from streams.messages import Run
from tests.rigs.command import Following, run
from tests.rigs.journals import grant, session
from tests.rigs.sqlite import PLENTY, make_journal_of_schema, record
from tests.wire.process import wait_until
from tests.wire.raw import DEADLINE_S

STREAMS = 24
LOGGED = 20  # this stream and later ones are in the log alone
# How many bytes are flipped, one at a time, in each page of a journal; more where `FLIPS` says so.
FLIPS = int(os.environ.get("FLIPS", "1"))
ORIGIN = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"build"}}'


def line(seq: int, size: int) -> bytes:
    params = {"data": {"n": seq, "text": "abcdefgh"[seq % 8] * size}}
    message = {"jsonrpc": "2.0", "method": "notifications/message", "params": params}
    return json.dumps(message).encode() + b"\n"


def lines(stream: str, first: int, last: int, size: int, *, is_end: bool = False) -> Append:
    body = b"".join(line(seq, size) for seq in range(first, last + 1))
    outcome = Outcome.COMPLETED if is_end else Outcome.LIVE
    return Append(stream, 1, Run(first, last + 1 - first, body), 0, 0, outcome)


def created(n: int) -> Create:
    return Create(replace(record(number=n), stream=f"stream-{n}", origin=ORIGIN))


def fill(opened: SQLiteStore) -> None:
    """Streams of all kinds, in the tables and in the log."""
    for n in range(1, STREAMS + 1):
        name, size = f"stream-{n}", (20, 300, 1000)[n % 3]
        is_end = n % 5 == 0
        opened.commit([created(n), lines(name, 1, 30, size)])
        opened.commit([lines(name, 31, 60, 20, is_end=is_end)])
    more: list[Change] = [lines(f"stream-{n}", 61, 70, 30) for n in range(1, 9) if n % 5]
    more += [Ack("stream-3", 1, 33), Ack("stream-4", 1, 70), Evict("stream-5", 1, 1.8e9)]
    more += [Close("stream-7", 1, Outcome.ABANDONED, 1.75e9), SaveSession(session())]
    opened.commit([*more, SaveGrant(grant(stream="stream-9"))])


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal as a killed server leaves it, but in one file."""
    folder = tmp_path_factory.mktemp("journal")
    with closing(SQLiteStore(folder / "original.db", durability="process")) as opened:
        opened.commit([created(n) for n in range(1, LOGGED)])  # closing writes them to the tables
    with closing(SQLiteStore(folder / "original.db", durability="process")) as opened:
        fill(opened)
        back_up(folder / "original.db", folder / "journal.db", lambda done, total: None)
    return folder / "journal.db"


@pytest.fixture
def copy(journal: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(journal, tmp_path / "journal.db"))


def exported(path: Path) -> dict[int, list[Any]]:
    """The part of each stream that can be saved, as lines of JSON, header and all."""
    found: dict[int, bytearray] = {}

    def on_stream(number: int) -> Lines:
        found[number] = bytearray()
        return Lines(found[number].extend)

    export_streams(path, on_stream, lambda done, total: None)
    return {
        number: [json.loads(each) for each in text.splitlines()] for number, text in found.items()
    }


class Said(msgspec.Struct):
    """The outcome of the command in this process."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Said]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    def command(*words: str | Path) -> Said:
        code = app([str(word) for word in words])
        return Said(code, *capfd.readouterr())

    return command


def messages_of(path: Path) -> dict[int, list[Any]]:
    """Of each stream its request and the messages that can be saved."""
    found = exported(path)
    return {
        number: [header.get("request"), *(each for each in rest if "missing" not in each)]
        for number, (header, *rest) in found.items()
    }


def test_a_sound_journal_is_said_to_be_sound(journal: Path) -> None:
    report = inspect(journal)
    assert report.problems == ()
    assert report.streams == STREAMS
    assert (report.schema, report.is_read) == (SCHEMA_VERSION, True)
    done = run("verify", str(journal))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"is sound: {STREAMS} streams, {report.messages:,} messages." in done.stdout


def test_an_export_has_every_message_that_is_not_confirmed(command: Command, journal: Path) -> None:
    done = command("export", journal)
    assert done.returncode == 0
    found = [json.loads(each) for each in done.stdout.splitlines()]
    headers = {each["stream"]: each for each in found if "stream" in each}
    assert list(headers) == list(range(1, STREAMS + 1))
    assert headers[5]["sha256"] == hashed("stream-5")
    assert headers[5]["request"] == json.loads(ORIGIN)
    assert headers[7]["outcome"] == "abandoned"
    assert (headers[3]["confirmed"], headers[3]["last"]) == (33, 70)
    by_stream = messages_of(journal)
    for number, (_, *saved) in by_stream.items():
        first, last = headers[number]["confirmed"] + 1, headers[number]["last"]
        assert [each["params"]["data"]["n"] for each in saved] == list(range(first, last + 1))
    assert len(found) == sum(map(len, by_stream.values()))
    assert inspect(journal).messages == len(found) - STREAMS
    assert done.stderr == f"{STREAMS} streams, {len(found) - STREAMS:,} messages.\n"


def test_ids_of_streams_are_not_exported(command: Command, journal: Path) -> None:
    assert "stream-1" not in command("export", journal).stdout


def test_an_export_to_a_folder_has_a_private_file_for_each_stream(
    command: Command, journal: Path, tmp_path: Path
) -> None:
    assert command("export", journal, "--to", tmp_path / "out").returncode == 0
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {f"{n}.ndjson" for n in range(1, STREAMS + 1)}
    text = (tmp_path / "out" / "1.ndjson").read_text()
    assert len(text.splitlines()) == 71
    assert stat.S_IMODE((tmp_path / "out" / "1.ndjson").stat().st_mode) == 0o600
    again = command("export", journal, "--to", tmp_path / "out")
    assert again.returncode == 2
    assert "is there already: name a new folder" in again.stderr


def test_an_export_to_tables_has_a_row_for_each_message(
    command: Command, journal: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.db"
    done = command("export", journal, "--sqlite", out)
    assert (done.returncode, done.stdout) == (0, "")
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    with closing(sqlite3.connect(out)) as tables:
        tables.row_factory = sqlite3.Row
        calls = {row["stream"]: row for row in tables.execute("SELECT * FROM calls")}
        rows = tables.execute("SELECT * FROM messages ORDER BY stream, seq").fetchall()
    assert list(calls) == list(range(1, STREAMS + 1))
    assert (calls[5]["tool"], calls[5]["method"]) == ("build", "tools/call")
    assert (calls[7]["outcome"], calls[5]["sha256"]) == ("abandoned", hashed("stream-5"))
    for number, (_, *saved) in messages_of(journal).items():
        theirs = [row for row in rows if row["stream"] == number]
        seqs = [row["seq"] for row in theirs]
        assert seqs == list(range(calls[number]["confirmed"] + 1, calls[number]["last"] + 1))
        assert [json.loads(row["json"]) for row in theirs] == saved
    assert {(row["kind"], row["method"]) for row in rows} == {
        ("notification", "notifications/message")
    }
    again = command("export", journal, "--sqlite", out)
    assert again.returncode == 2
    assert "exists already: name a new file" in again.stderr
    both = command("export", journal, "--sqlite", out, "--to", tmp_path / "folder")
    assert both.returncode == 2


def test_tables_tell_which_messages_are_lost(command: Command, copy: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(copy)) as damaged, damaged:
        damaged.execute("DELETE FROM runs WHERE stream = 2")
    out = tmp_path / "out.db"
    assert command("export", copy, "--sqlite", out).returncode == 1
    with closing(sqlite3.connect(out)) as tables:
        lost = tables.execute(
            "SELECT count(*) FROM messages WHERE stream = 2 AND kind = 'missing' AND json IS NULL"
        )
        assert lost.fetchone()[0] > 0


def test_a_damaged_number_does_not_make_endless_tables(
    command: Command, copy: Path, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(copy)) as damaged, damaged:
        damaged.execute("UPDATE progress SET last = 1 << 60 WHERE id = 2")
    out = tmp_path / "out.db"
    assert command("export", copy, "--sqlite", out).returncode == 1
    with closing(sqlite3.connect(out)) as tables:
        [(rows,)] = tables.execute("SELECT count(*) FROM messages WHERE kind = 'missing'")
        assert rows == MISSING_MAX


def test_wherever_a_byte_is_flipped_it_is_found_or_has_hurt_nothing(
    journal: Path, tmp_path: Path
) -> None:
    content, sound = journal.read_bytes(), messages_of(journal)
    [page_bytes] = sqlite_pragma(journal, "page_size")
    dice, found, lost = random.Random(5), 0, 0
    for page in range(0, len(content), page_bytes):
        for n in range(FLIPS):
            at = page + dice.randrange(page_bytes)
            flipped = tmp_path / f"{at}-{n}.db"
            flipped.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
            is_found, missing = looked_at(flipped, sound)
            found += is_found
            lost += missing
            flipped.unlink()
    assert found > 0
    assert lost < 100 * found, "all is lost where a byte was"


def looked_at(path: Path, sound: dict[int, list[Any]]) -> tuple[bool, int]:
    """Whether damage is found, and how many messages cannot be saved."""
    try:
        problems = inspect(path).problems
        saved = messages_of(path)
    except JournalError:
        return True, 0
    assert problems or saved == sound
    kept = sum(len(each) for each in saved.values())
    return bool(problems), max(0, sum(map(len, sound.values())) - kept)


def sqlite_pragma(path: Path, name: str) -> Any:
    with closing(sqlite3.connect(path)) as opened:
        return opened.execute(f"PRAGMA {name}").fetchone()


@pytest.mark.parametrize("seed", range(3))
def test_an_export_survives_pages_of_garbage(command: Command, copy: Path, seed: int) -> None:
    dice, content = random.Random(seed), bytearray(copy.read_bytes())
    [page_bytes] = sqlite_pragma(copy, "page_size")
    pages = len(content) // page_bytes
    for page in dice.sample(range(1, pages), pages // 8):  # the first one says what the file is
        content[page * page_bytes : (page + 1) * page_bytes] = dice.randbytes(page_bytes)
    copy.write_bytes(content)
    verified, saved = command("verify", copy, "--json"), command("export", copy)
    assert verified.returncode == 1
    assert json.loads(verified.stdout)["sound"] is False
    assert saved.returncode in (1, 2), saved.stderr
    if saved.returncode == 1:
        assert all(isinstance(json.loads(each), dict) for each in saved.stdout.splitlines())


@pytest.mark.parametrize(
    "words", [("backup", "TO"), ("copy", "TO"), ("export", "--sqlite", "TO")], ids=lambda w: w[0]
)
def test_what_is_left_of_another_journal_is_not_applied_to_a_new_file(
    command: Command, copy: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """SQLite would write the pages of such a WAL over those of the new file."""
    other = tmp_path / "other.db"
    with closing(SQLiteStore(other)) as opened:
        opened.commit([created(1)])
        left = Path(f"{other}-wal").read_bytes()
    other.unlink()
    Path(f"{other}-wal").write_bytes(left)
    done = command(words[0], copy, *words[1:-1], other)
    assert done.returncode == 2
    assert f"{other}-wal is left of a file that was there: remove it" in done.stderr
    assert not other.exists()


@pytest.mark.parametrize("part", [0.9, 0.5])
def test_what_is_left_of_a_file_without_its_end_is_verified_and_exported(
    copy: Path, part: float
) -> None:
    """SQLite itself refuses each statement on a file that is shorter than its header says."""
    os.truncate(copy, int(part * copy.stat().st_size))
    assert inspect(copy).problems
    assert sum(map(len, messages_of(copy).values())) > 2 * STREAMS
    with pytest.raises(JournalError):  # a copy of it would look whole
        back_up(copy, copy.with_name("to.db"), lambda done, total: None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("words", [("backup", "TO"), ("export", "--sqlite", "TO")])
def test_a_command_that_is_ended_leaves_no_hidden_file(
    copy: Path, words: tuple[str, ...], number: signal.Signals
) -> None:
    """The command is slowed down: it is ended while its file is half written."""
    place = copy.parent / "out"
    place.mkdir()
    slow = (
        "import sys, time; from streams.journal.sqlite import backup as b; "
        "export, copied = b._export_stream, b._copy; "
        "b._export_stream = lambda *given: (time.sleep(9), export(*given)); "
        "b._copy = lambda source, file, told: (time.sleep(9), copied(source, file, told)); "
        "from streams.cli import main; main()"
    )
    given = [words[0], str(copy), *words[1:-1], str(place / "to")]
    process = subprocess.Popen([sys.executable, "-c", slow, *given], stderr=subprocess.PIPE)
    with process:
        wait_until("a hidden file", lambda: list(place.iterdir()))
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert list(place.iterdir()) == []


def damage(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as opened:
        for statement in statements:
            opened.execute(statement)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DELETE FROM runs WHERE stream = 2 AND last = 30", r"stream 2 .*1 to 30 are missing"),
        ("UPDATE runs SET count = 2 WHERE stream = 2 AND last = 30", r"stream 2 .* are damaged"),
        ("UPDATE runs SET last = 40 WHERE stream = 2 AND last = 30", r"stream 2 .* are missing"),
        ("UPDATE progress SET acked = last + 5 WHERE id = 5", r"stream 5 .*is confirmed up to"),
        ("UPDATE progress SET outcome = 'well' WHERE id = 9", "stream 9: its record cannot be"),
        ("UPDATE progress SET last = 'ten' WHERE id = 9", "stream 9: its record cannot be"),
        ("UPDATE streams SET origin = 'x' WHERE id = 9", "stream 9: its record cannot be"),
        ("UPDATE streams SET origin = X'7B' WHERE id = 9", "stream 9 .* request cannot be read"),
        ("DELETE FROM progress WHERE id = 9", "stream 9: its record is missing"),
        ("DELETE FROM streams WHERE id = 9", "1 rows in `awake` belong to no stream"),
        ("DELETE FROM awake WHERE id = 9", "1 streams are in neither `awake` nor `rests`"),
        ("INSERT INTO awake (id) VALUES (5)", "1 streams are in both `awake` and `rests`"),
        ("DELETE FROM sessions", "1 grants belong to no session"),
        ("UPDATE log SET body = substr(body, 2)", "row .* of the log cannot be read"),
        ("DELETE FROM log WHERE id = (SELECT min(id) FROM log)", "the log does not fit the tables"),
    ],
)
def test_what_breaks_our_own_rules_is_found(copy: Path, statement: str, said: str) -> None:
    damage(copy, statement)
    found = [str(problem) for problem in inspect(copy).problems]
    assert any(re.search(said, each) for each in found), found


def test_who_has_a_damaged_journal_is_told_what_to_do(command: Command, copy: Path) -> None:
    damage(copy, "DELETE FROM runs WHERE stream = 2 AND last = 30")
    done = command("verify", copy)
    assert done.returncode == 1
    assert re.fullmatch(r"stream 2 \([0-9a-f]{8}…\): messages 1 to 30 are missing\n", done.stdout)
    assert f"{copy} is damaged" in done.stderr
    assert "restore a backup, or save what is readable with export" in done.stderr


def test_an_export_says_which_messages_are_missing(command: Command, copy: Path) -> None:
    damage(
        copy,
        "DELETE FROM runs WHERE stream = 2 AND last = 30",
        "UPDATE progress SET outcome = 'well' WHERE id = 9",
    )
    done = command("export", copy)
    assert done.returncode == 1
    assert "30 are missing" in done.stderr
    assert "stream 9: its record cannot be read" in done.stderr
    found = exported(copy)
    assert found[2][1] == {"missing": {"from": 1, "to": 30}}
    assert [each["params"]["data"]["n"] for each in found[2][2:]] == list(range(31, 71))
    assert found[9][0] == {"stream": 9, "request": json.loads(ORIGIN)}
    assert [each["params"]["data"]["n"] for each in found[9][1:]] == list(range(1, 61))


def test_a_line_that_is_no_json_is_missing_alone(copy: Path) -> None:
    damage(
        copy,
        "UPDATE runs SET body = CAST(replace(CAST(body AS TEXT), '\"n\": 7,', '\"n: 7,') AS BLOB) "
        "WHERE stream = 2 AND last = 30",
    )
    found = exported(copy)
    assert found[2][7] == {"missing": {"from": 7, "to": 7}}
    assert [each["params"]["data"]["n"] for each in found[2][8:]] == list(range(8, 71))


def test_a_journal_of_an_older_release_is_left_to_that_release(
    command: Command, tmp_path: Path
) -> None:
    old = make_journal_of_schema(4, tmp_path / "old.db")
    done = command("verify", old)
    assert done.returncode == 0
    assert "schema 4 is an older one: its streams were not looked at" in done.stdout
    refused = command("export", old)
    assert refused.returncode == 2
    assert "export it with that release" in refused.stderr


@pytest.mark.parametrize("verb", ["verify", "export", "backup"])
def test_what_is_no_journal_is_refused(command: Command, tmp_path: Path, verb: str) -> None:
    to = [tmp_path / "to"] if verb == "backup" else []
    for name, content in (("text", b"no database" * 99), ("empty", b""), ("none", None)):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        done = command(verb, path, *to)
        assert done.returncode == 2, done.stderr
        assert str(path) in done.stderr
        assert done.stdout == ""
        assert not (tmp_path / "to").exists()


def test_a_journal_that_is_refused_leaves_no_folder(command: Command, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"no database" * 99)
    for journal in (tmp_path / "text", tmp_path / "none", tmp_path):
        assert command("export", journal, "--to", tmp_path / "to").returncode == 2
        assert not (tmp_path / "to").exists()
    (tmp_path / "to").mkdir()  # which is not ours to remove
    assert command("export", tmp_path / "none", "--to", tmp_path / "to").returncode == 2
    assert (tmp_path / "to").exists()


def test_nothing_is_written_by_who_only_looks(command: Command, copy: Path) -> None:
    before = copy.read_bytes(), copy.stat().st_mtime_ns
    command("verify", copy)
    command("export", copy)
    command("backup", copy, f"{copy}.copy")
    assert (copy.read_bytes(), copy.stat().st_mtime_ns) == before


def test_a_copy_takes_no_other_files_place(command: Command, copy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    done = command("backup", copy, other)
    assert done.returncode == 2
    assert "exists already: name a new file" in done.stderr
    assert other.read_text() == "mine"
    with Following("backup", str(copy), str(other), on_terminal=True) as backup:
        assert backup.end() == (2, "")
    assert backup.said == f"{other} exists already: name a new file.\n", "no bar before that"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal.db", "other"]


@pytest.mark.parametrize("with_keys", [True, False])
def test_a_copy_is_one_private_file_and_its_keys_are_asked_for(
    command: Command, copy: Path, tmp_path: Path, with_keys: bool
) -> None:
    token = Keyring.load(key_path(copy)).token("stream-1")
    to = tmp_path / "to.db"
    done = command("backup", copy, to, *(["--with-keys"] if with_keys else []))
    assert done.returncode == 0, done.stderr
    assert ("no keys" in done.stderr) is not with_keys
    made = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("to*")}
    assert made == dict.fromkeys(["to.db", "to.db.key"] if with_keys else ["to.db"], 0o600)
    assert Keyring.load(key_path(to)).is_token_of("stream-1", token) is with_keys
    with closing(SQLiteStore(to)) as opened:
        assert len(opened.claim()) == STREAMS - 1  # one is evicted
        assert opened.read("stream-1", 60, bytes_max=PLENTY)[0].last == 70


def test_a_copy_has_what_was_there_before_it_began(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with closing(SQLiteStore(path)) as opened:
        fill(opened)
        steps: list[int] = []

        def meanwhile(done: int, total: int) -> None:
            last = 60 + 10 * len(steps)
            steps.append(done)
            assert opened.commit([lines("stream-10", last + 1, last + 1, 9)])

        damage(path)  # another program may look and leave at any time
        back_up(path, tmp_path / "copy.db", meanwhile)
        assert len(steps) >= 1
    assert inspect(tmp_path / "copy.db").problems == ()
    assert [each[0]["last"] for each in exported(tmp_path / "copy.db").values()][9] == 60


def test_an_export_is_shown_by_a_bar_on_a_terminal(copy: Path, tmp_path: Path) -> None:
    words = ("export", str(copy), "--to", str(tmp_path / "out"))
    with Following(*words, on_terminal=True) as following:
        following.wait_for("%")
        code, _ = following.end()
    assert code == 0
