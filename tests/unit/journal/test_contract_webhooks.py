"""The promises of every journal about webhooks that wait: one suite for all of them."""

from typing import Any

from msgspec.structs import replace

from streams.errors import Fenced
from streams.journal.records import Create, Forget
from streams.journal.webhooks import DropWebhook, SaveWebhook, Webhook
from tests.rigs.journals import (
    OpenJournal,
    OpenReplica,
    append,
    applied,
    last_append,
    record,
)

ALL = 99


def webhook(number: int = 1, **more: Any) -> Webhook:
    given = {"due_at": 1.75e9 + number} | more
    return Webhook(f"msg_{number}", "s", "https://example.com/in", b'{"n":%d}' % number, **given)


async def test_a_webhook_comes_back_in_every_field(open_journal: OpenJournal) -> None:
    strange = Webhook(
        "msg_ü", "s\U0001f600", "https://example.com/?a=%20", b"\x00\xff", 1.75e9 + 0.125, 7
    )
    async with open_journal("one") as journal:
        await applied(journal, SaveWebhook(strange))
        assert await journal.webhooks(limit=ALL) == [strange]
        assert await journal.count_webhooks() == 1


async def test_webhooks_come_with_the_lines_that_they_tell_of(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        first = append(1, 2, webhooks=(webhook(1),))
        await applied(journal, Create(record()), first, last_append(3, 3, webhooks=(webhook(2),)))
        assert await journal.webhooks(limit=ALL) == [webhook(1), webhook(2)]


async def test_a_refused_append_adds_no_webhook(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await applied(journal, Create(record()), append(1, 1))
        refused = append(2, 2, fence=7, webhooks=(webhook(),))
        [error] = await journal.commit([refused])
        assert isinstance(error, Fenced)
        assert await journal.webhooks(limit=ALL) == []


async def test_a_repeated_append_adds_its_webhook_once(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        told = last_append(1, 1, webhooks=(webhook(),))
        await applied(journal, Create(record()), told)
        await applied(journal, told)
        assert await journal.webhooks(limit=ALL) == [webhook()]
        await applied(journal, DropWebhook("msg_1"))
        await applied(journal, told)  # its receiver has it
        assert await journal.webhooks(limit=ALL) == []


async def test_webhooks_outlive_their_stream_and_the_process(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await applied(journal, Create(record()), last_append(1, 1, webhooks=(webhook(),)))
        await applied(journal, Forget("s", 1))
        assert await journal.webhooks(limit=ALL) == [webhook()]
    async with open_journal("one") as journal:
        assert await journal.webhooks(limit=ALL) == [webhook()]


async def test_a_saved_webhook_replaces_the_one_before(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await applied(journal, SaveWebhook(webhook(1)), SaveWebhook(webhook(2)))
        later = replace(webhook(1), attempts=3, due_at=1.75e9 + 10)
        await applied(journal, SaveWebhook(later))
        assert await journal.webhooks(limit=ALL) == [webhook(2), later]
        assert await journal.webhooks(limit=1) == [webhook(2)]
        await applied(journal, DropWebhook("msg_2"), DropWebhook("msg_9"))
        assert await journal.webhooks(limit=ALL) == [later]
        assert await journal.count_webhooks() == 1


async def test_only_webhooks_that_are_due_are_taken(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await applied(journal, *(SaveWebhook(webhook(n)) for n in (3, 1, 2)))
        now, until = 1.75e9 + 2, 1.75e9 + 60
        taken = await journal.take_webhooks(now, until, limit=ALL)
        assert [each.id for each in taken] == ["msg_1", "msg_2"]
        assert [each.body for each in taken] == [b'{"n":1}', b'{"n":2}']


async def test_of_replicas_that_take_a_webhook_one_gets_it(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        await applied(one, Create(record()), last_append(1, 1, webhooks=(webhook(),)))
        now, until = 1.75e9 + 1, 1.75e9 + 60
        assert [each.id for each in await one.take_webhooks(now, until, limit=ALL)] == ["msg_1"]
        assert list(await two.take_webhooks(now, until, limit=ALL)) == []
        # The first replica was killed before it has sent it.
        [again] = await two.take_webhooks(until, until + 60, limit=ALL)
        assert (again.id, again.body) == ("msg_1", b'{"n":1}')
        await applied(two, DropWebhook("msg_1"))
        assert await one.count_webhooks() == 0
