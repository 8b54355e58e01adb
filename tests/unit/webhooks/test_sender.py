"""A webhook is sent until its receiver has taken it, and by one sender at a time."""

import math
from collections.abc import Sequence
from email.utils import formatdate

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from streams.errors import Unavailable
from streams.journal.memory import MemoryJournal
from streams.journal.webhooks import SaveWebhook
from streams.webhooks.receivers import addresses_of
from streams.webhooks.sender import (
    AT_ONCE,
    ATTEMPT_S,
    ATTEMPTS_MAX,
    BUSY_S,
    JITTER,
    LEASE_S,
    PER_RECEIVER,
    RETRY_AFTER_MAX_S,
    SCHEDULE,
    Answer,
)
from streams.webhooks.signatures import Signer
from tests.rigs.journals import applied
from tests.rigs.shared_memory import SharedStore
from tests.rigs.webhooks import (
    BEGAN_AT,
    OTHER_SECRET,
    SECRET,
    URL,
    Inbox,
    queue,
    sending,
    until_empty,
    webhook,
)


async def journal_with(*webhooks: object) -> MemoryJournal:
    journal = MemoryJournal()
    await applied(journal, *(SaveWebhook(each) for each in webhooks))  # type: ignore[arg-type]
    return journal


async def test_an_accepted_webhook_is_sent_once(autojump_clock: MockClock) -> None:
    journal, inbox = await journal_with(webhook()), Inbox(200)
    async with sending(journal, inbox.post):
        await until_empty(journal)
        await trio.sleep(2 * LEASE_S)
    [(_, url, headers, body)] = inbox.received
    assert (url, body, headers["webhook-id"]) == (URL, webhook().body, "msg_1")
    assert int(headers["webhook-timestamp"]) == BEGAN_AT


async def test_a_receiver_that_fails_20_times_gets_its_webhook(autojump_clock: MockClock) -> None:
    journal, inbox = await journal_with(webhook()), Inbox(*[500] * 20, 204)
    async with sending(journal, inbox.post):
        await until_empty(journal)
    assert inbox.ids == ["msg_1"] * 21
    pauses = [b - a for a, b in zip(inbox.times, inbox.times[1:], strict=False)]
    expected = [*SCHEDULE, *[SCHEDULE[-1]] * 20][:20]
    for pause, planned in zip(pauses, expected, strict=True):
        assert planned * (1 - JITTER) <= pause <= planned * (1 + JITTER) + 0.01


async def test_each_attempt_has_its_own_time(autojump_clock: MockClock) -> None:
    journal, inbox = await journal_with(webhook()), Inbox(500, 204)
    async with sending(journal, inbox.post):
        await until_empty(journal)
    times = [int(headers["webhook-timestamp"]) for _, _, headers, _ in inbox.received]
    assert times == [int(BEGAN_AT + at) for at in inbox.times]


async def test_a_receiver_that_always_fails_is_given_up(autojump_clock: MockClock) -> None:
    journal, inbox = await journal_with(webhook()), Inbox(503)
    async with sending(journal, inbox.post):
        await until_empty(journal)
    assert len(inbox.received) == ATTEMPTS_MAX
    assert 14 < inbox.times[-1] / 86_400 < 21


async def test_a_gone_receiver_gets_nothing_more(autojump_clock: MockClock) -> None:
    journal, inbox = await journal_with(webhook()), Inbox(410)
    async with sending(journal, inbox.post):
        await until_empty(journal)
        await trio.sleep(86_400)
    assert inbox.ids == ["msg_1"]


@pytest.mark.parametrize("failure", [301, 302, 307, 308, 304, 400, 401, 404, 500, OSError("no")])
async def test_all_but_success_is_tried_again(
    autojump_clock: MockClock, failure: int | OSError
) -> None:
    journal, inbox = await journal_with(webhook()), Inbox(failure, 204)
    async with sending(journal, inbox.post):
        await until_empty(journal)
    assert inbox.ids == ["msg_1"] * 2
    assert {url for _, url, _, _ in inbox.received} == {URL}, "a redirect is not followed"


async def test_a_receiver_that_hangs_is_left_after_15_s(autojump_clock: MockClock) -> None:
    journal, inbox = await journal_with(webhook()), Inbox(math.inf, 204)
    async with sending(journal, inbox.post):
        await until_empty(journal)
    first, second = inbox.times
    assert second - first >= ATTEMPT_S + SCHEDULE[0] * (1 - JITTER)


@pytest.mark.parametrize(
    ("asked", "least_s", "most_s"),
    [
        ("600", 600, 601),
        (formatdate(BEGAN_AT + 900, usegmt=True), 899, 901),
        ("99999999", RETRY_AFTER_MAX_S, RETRY_AFTER_MAX_S + 1),
        ("1", 4, 6),
        ("soon", 4, 6),
        (formatdate(BEGAN_AT - 900, usegmt=True), 4, 6),
    ],
)
async def test_retry_after_may_make_a_pause_longer(
    autojump_clock: MockClock, asked: str, least_s: float, most_s: float
) -> None:
    journal, inbox = await journal_with(webhook()), Inbox(Answer(429, asked), 204)
    async with sending(journal, inbox.post):
        await until_empty(journal)
    assert least_s <= inbox.times[1] - inbox.times[0] <= most_s


async def test_a_hanging_receiver_does_not_keep_others_waiting(autojump_clock: MockClock) -> None:
    hung = [webhook(n) for n in range(3 * AT_ONCE)]
    other = webhook(99, "https://other.example/in", due_at=BEGAN_AT + 1)
    journal = await journal_with(*hung, other)
    at: dict[str, float] = {}
    under_way = most = 0

    async def post(url: str, *_: object) -> Answer:
        nonlocal under_way, most
        if url != URL:
            at[url] = trio.current_time()
            return Answer(204)
        under_way += 1
        most = max(most, under_way)
        try:
            await trio.sleep_forever()
        finally:
            under_way -= 1

    async with sending(journal, post):
        with trio.fail_after(60):
            while not at:
                await trio.sleep(0.1)
    assert at[other.url] < ATTEMPT_S, "before the first of the others has failed"
    assert most == PER_RECEIVER


async def test_a_prompt_receiver_does_not_wait_for_many_that_hang(
    autojump_clock: MockClock,
) -> None:
    hung = [webhook(n, f"https://{n % 5}.hung.example/") for n in range(10 * AT_ONCE)]
    first = webhook(990)
    more = [webhook(1000 + n, due_at=BEGAN_AT + 60) for n in range(2 * AT_ONCE)]
    journal = await journal_with(*hung, first, *more)
    at: list[float] = []

    async def post(url: str, *_: object) -> Answer:
        if url != URL:
            await trio.sleep_forever()
        at.append(trio.current_time())
        return Answer(204)

    async with sending(journal, post):
        with trio.fail_after(200):
            while len(at) <= len(more):
                await trio.sleep(0.1)
    assert max(at) - 60 < ATTEMPT_S, "they took no turns with those that hang"


async def test_another_way_to_write_a_receiver_is_the_same_receiver(
    autojump_clock: MockClock,
) -> None:
    forms = ["example.com", "EXAMPLE.com", "exAmple.com.", "example.com:443", "Example.com.:443"]
    urls = [f"https://{form}/{n}" for form in forms for n in range(AT_ONCE)]
    many = [webhook(n, url) for n, url in enumerate(urls)]
    journal, inbox = await journal_with(*many), Inbox(1.0)
    async with sending(journal, inbox.post):
        await until_empty(journal)
    assert inbox.most_under_way == PER_RECEIVER
    assert sorted(inbox.ids) == sorted(each.id for each in many)


@pytest.mark.parametrize(
    "url",
    [
        *("", "http://[x", "http://a:99999/", "http://a:abc/", "file:///etc/passwd", "http:///"),
        *(f"http://{'a' * 70}.example/", "http://a..b/"),
    ],
)
async def test_a_url_that_cannot_be_used_is_dropped_with_one_warning(
    autojump_clock: MockClock, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    journal, inbox = await journal_with(webhook(1, url), webhook(2)), Inbox()

    async def resolved(url: str) -> Sequence[str]:
        return ["192.0.2.1"] if url == URL else await addresses_of(url, is_private_allowed=True)

    async with sending(journal, inbox.post, resolve=resolved):
        await until_empty(journal)
    assert inbox.ids == ["msg_2"]
    [line] = [each for each in capsys.readouterr().err.splitlines() if "dropped" in each]
    assert "msg_1" in line


async def test_a_body_that_cannot_be_signed_is_dropped(autojump_clock: MockClock) -> None:
    journal, inbox = await journal_with(replace(webhook(1), body=b"\xff"), webhook(2)), Inbox()
    async with sending(journal, inbox.post):
        await until_empty(journal)
    assert inbox.ids == ["msg_2"]


@pytest.mark.parametrize("id", ["a\r\nx: y", "é☃"])
async def test_an_id_that_is_no_header_is_dropped_and_shown_escaped(
    autojump_clock: MockClock, capsys: pytest.CaptureFixture[str], id: str
) -> None:
    journal = await journal_with(replace(webhook(), id=id))

    async def refusing(*_: object) -> Answer:
        raise ValueError("Illegal header value")  # as `transports.http.post` does

    async with sending(journal, refusing):
        await until_empty(journal)
    printed = capsys.readouterr().err
    assert "dropped" in printed
    assert ascii(id)[1:-1] in printed.replace("\\\\", "\\")


async def test_no_more_than_some_are_sent_at_once(autojump_clock: MockClock) -> None:
    many = [webhook(n, f"https://{n}.example/") for n in range(3 * AT_ONCE)]
    journal, inbox = await journal_with(*many), Inbox(1.0)
    async with sending(journal, inbox.post):
        await until_empty(journal)
    assert inbox.most_under_way == AT_ONCE
    assert sorted(inbox.ids) == sorted(each.id for each in many)


async def test_a_busy_receiver_gets_all_of_its_webhooks(autojump_clock: MockClock) -> None:
    many = [webhook(n) for n in range(5 * PER_RECEIVER)]
    journal, inbox = await journal_with(*many), Inbox(1.0)
    async with sending(journal, inbox.post):
        await until_empty(journal, within_s=20 * BUSY_S)
    assert sorted(inbox.ids) == sorted(each.id for each in many)
    assert inbox.most_under_way == PER_RECEIVER


async def test_a_webhook_of_a_replica_that_dies_is_sent_by_another(
    autojump_clock: MockClock,
) -> None:
    store = SharedStore()
    one, two = store.open(), store.open()
    await applied(one, SaveWebhook(webhook()))
    hanging, inbox = Inbox(math.inf), Inbox(204)
    async with sending(one, hanging.post):
        while not hanging.received:
            await trio.sleep(0.1)
    # The first sender ended like a killed one, before it has told anything to the journal.
    async with sending(two, inbox.post):
        await until_empty(two, within_s=LEASE_S + ATTEMPT_S)
    assert inbox.ids == ["msg_1"]


async def test_of_two_replicas_one_sends_an_event(autojump_clock: MockClock) -> None:
    store = SharedStore()
    one, two = store.open(), store.open()
    many = [webhook(n, f"https://{n}.example/") for n in range(40)]
    await applied(one, *map(SaveWebhook, many))
    inbox = Inbox(0.5)
    async with sending(one, inbox.post), sending(two, inbox.post):
        await until_empty(one)
    assert sorted(inbox.ids) == sorted(each.id for each in many)


async def test_replicas_lease_no_webhook_that_they_do_not_send(autojump_clock: MockClock) -> None:
    store = SharedStore()
    one, two = store.open(), store.open()
    many = [webhook(n, f"https://{n}.example/") for n in range(6 * AT_ONCE + 4)]
    await applied(one, *map(SaveWebhook, many))

    async def post(url: str, *_: object) -> Answer:
        sent.append(url)
        await trio.sleep(0.01 * (len(sent) % 7))  # so that there is room for a few at a time
        return Answer(204)

    sent: list[str] = []
    async with sending(one, post), sending(two, post):
        await until_empty(one, within_s=3.0)
    assert sorted(sent) == sorted(each.url for each in many)


async def test_a_webhook_that_is_added_is_sent_at_once(autojump_clock: MockClock) -> None:
    journal, inbox, of = MemoryJournal(), Inbox(), queue()
    async with sending(journal, inbox.post, of):
        await trio.sleep(3.0)
        await applied(journal, SaveWebhook(webhook()))
        added_at = trio.current_time()
        of.has_more.set()
        await until_empty(journal)
    assert inbox.times == [added_at]


async def test_a_journal_that_takes_nothing_for_a_while_is_asked_again(
    autojump_clock: MockClock,
) -> None:
    journal, inbox = await journal_with(webhook()), Inbox()
    commit, left = journal.commit, 5

    async def busy(changes: object) -> object:
        nonlocal left
        left -= 1
        if left > 0:
            raise Unavailable("busy")
        return await commit(changes)  # type: ignore[arg-type]

    journal.commit = busy  # type: ignore[assignment, method-assign]
    async with sending(journal, inbox.post):
        await until_empty(journal)
    assert inbox.ids == ["msg_1"], "it is not sent again meanwhile"


async def test_nothing_is_sent_where_a_name_cannot_be_used(autojump_clock: MockClock) -> None:
    async def refused(url: str) -> list[str]:
        raise OSError(f"{url} leads to 10.0.0.1, which is not public")

    journal, inbox = await journal_with(webhook()), Inbox()
    async with sending(journal, inbox.post, resolve=refused):
        await trio.sleep(60)
    assert inbox.received == []
    [kept] = await journal.webhooks(limit=9)
    assert kept == replace(webhook(), attempts=2, due_at=kept.due_at)


async def test_the_log_has_no_path_of_a_url(
    autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "https://hooks.example/services/T0/SECRET"
    failure = OSError(f"{secret}: refused; without TLS {secret.replace('https', 'http')}")
    journal, inbox = await journal_with(webhook(1, secret)), Inbox(failure, 500, 410)
    async with sending(journal, inbox.post):
        await until_empty(journal)
    printed = capsys.readouterr()
    assert "hooks.example" in printed.out + printed.err
    assert "SECRET" not in printed.out + printed.err


async def test_the_signature_is_that_of_the_secret(autojump_clock: MockClock) -> None:
    journal, inbox = await journal_with(webhook()), Inbox()
    now = None
    async with sending(journal, inbox.post, clock=lambda: now or 1.75e9):
        await until_empty(journal)
    [(_, _, headers, body)] = inbox.received
    assert headers == Signer([SECRET]).headers("msg_1", 1.75e9, body)
    assert headers != Signer([OTHER_SECRET]).headers("msg_1", 1.75e9, body)
