"""The webhooks of a process: its options, its secret, and the task that sends."""

import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from streams.engine.hooks import Hooks
from streams.journal.contract import Journal
from streams.logs import log
from streams.process import state
from streams.process.options import CannotServe, Options
from streams.webhooks.queue import Queue
from streams.webhooks.receivers import Receivers
from streams.webhooks.sender import Answer, Sender
from streams.webhooks.signatures import Signer, make_secret, read_signer
from transports.http.post import post


@asynccontextmanager
async def open_webhooks(options: Options, journal: Journal) -> AsyncIterator[Hooks]:
    """Send webhooks for the length of a block. Raises `CannotServe`."""
    given = options.webhooks
    try:
        receivers = Receivers(given.webhook_allow, is_private_allowed=given.webhook_private)
        for url in given.webhook:
            receivers.checked(url)
        signer = read_signer(_secret_file(options))
    except (ValueError, OSError) as error:
        raise CannotServe(f"No webhooks can be sent: {error}.") from error
    queue = Queue(receivers, given.webhook, has_content=given.webhook_content)
    # With https, names and certificates are those of the system.
    send = partial(post_webhook, ssl.create_default_context())
    is_private_allowed = given.webhook_private
    sender = Sender(journal, queue, signer, send, is_private_allowed=is_private_allowed)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.run)
        yield queue
        nursery.cancel_scope.cancel()


def read_secrets(path: Path) -> Signer:
    """The secrets in a file, to check what others have signed. Raises `CannotServe`.

    A file that is missing is made: its server may start later, and uses it then.
    """
    try:
        make_secret(path)
        return read_signer(path)
    except (ValueError, OSError) as error:
        raise CannotServe(f"The secret of webhooks cannot be used: {error}.") from error


def _secret_file(options: Options) -> Path:
    """The file with the secret, which is made if none was named. Raises `OSError`, `ValueError`."""
    given = options.webhooks.webhook_secret_file
    if given is not None:
        return given
    if options.store is not None:
        raise ValueError(
            "all replicas of a store must sign with the same secret: name its file with "
            "--webhook-secret-file"
        )
    try:
        path = secret_path(options.journal)
    except RuntimeError:
        raise ValueError("no home directory for a secret: use --webhook-secret-file") from None
    if make_secret(path):
        log.info("webhooks are signed with a new secret", see=f"cat {path}")
    return path


def secret_path(journal: Path | None) -> Path:
    """Where a server keeps the secret that it has made: beside its journal, if it has one.

    Raises `RuntimeError` if the user has no home directory.
    """
    if journal is None:
        return state.folder() / "webhook-secret"
    return journal.with_name(f"{journal.name}.webhook-secret")


async def post_webhook(
    context: ssl.SSLContext,
    url: str,
    addresses: Sequence[str],
    headers: Mapping[str, str],
    body: bytes,
) -> Answer:
    """See `streams.webhooks.sender.Post`."""
    found = await post(url, addresses, headers, body, ssl_context=context)
    return Answer(found.status, found.fields.get("retry-after", ""))
