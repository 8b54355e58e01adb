"""Webhooks that wait: messages about calls, each for one URL, until its receiver has taken it.

They are rows of their own, so they outlive their streams. A webhook is added by the `Append` that
it tells of, in one step with it: after a crash the journal has both, or neither.
"""

from typing import ClassVar, Protocol

import msgspec


class Webhook(msgspec.Struct, frozen=True):
    """One message to one receiver. Times are wall-clock seconds since 1970."""

    id: str  # the same at each attempt, and if the commit that adds it is repeated
    stream: str  # that it tells of
    url: str
    body: bytes  # JSON, as it is signed and sent
    due_at: float  # when it is to be sent next
    attempts: int = 0  # that have failed


class SaveWebhook(msgspec.Struct, frozen=True):
    """A new version of a webhook, or one that the journal does not have."""

    stream: ClassVar[None] = None  # as with a change of a session
    webhook: Webhook


class DropWebhook(msgspec.Struct, frozen=True):
    """A webhook is done with."""

    stream: ClassVar[None] = None
    id: str


WebhookChange = SaveWebhook | DropWebhook


class WebhookRows(Protocol):
    """Where a backend keeps webhooks."""

    def put_webhook(self, webhook: Webhook) -> None:
        """Replace the webhook with the same id, if any."""

    def drop_webhook(self, id: str) -> None: ...


def apply_to_webhooks(rows: WebhookRows, change: WebhookChange) -> None:
    """Apply `change` to `rows`. Deleting an unknown row changes nothing."""
    match change:
        case SaveWebhook():
            rows.put_webhook(change.webhook)
        case DropWebhook():
            rows.drop_webhook(change.id)
