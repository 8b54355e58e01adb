"""One call in detail: what its client has missed, and its messages."""

from collections import Counter

import msgspec

from streams.observe.lines import Kind, MessageView, counted, views
from streams.observe.registry import CallView, Registry

# Bytes that are read to count what a client has missed. 4 MiB take 10 ms.
COUNTED_BYTES_MAX = 4 * 1024 * 1024
READ_BYTES = 256 * 1024
SENT_BYTES_MAX = 1024 * 1024  # one message more may be longer


class CallDetail(CallView, frozen=True, rename="camel", kw_only=True):
    """A call with what its client has not confirmed, by kind.

    `uncounted` messages were not looked at: there are too many.
    """

    missed: dict[Kind, int]
    uncounted: int


class MessagesFound(msgspec.Struct, frozen=True, rename="camel"):
    """Kept messages of a call, in order. `after` leads to the next ones; None at the end for now.

    Messages up to `gone` are kept no longer: the client has them.
    """

    messages: tuple[MessageView, ...]
    after: int | None
    gone: int


class Details:
    """Reads calls in detail. All methods raise `NoSuchCall` and the errors of the journal."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def call(self, prefix: str) -> CallDetail:
        """The call whose id begins with `prefix`."""
        stream = await self._registry.find(prefix)
        call = await self._registry.call(stream)
        record = await self._registry.record(stream)
        missed: Counter[Kind] = Counter()
        after, size = call.delivered, 0
        while call.pending and after < call.durable and size < COUNTED_BYTES_MAX:
            runs = await self._registry.runs(stream, after, bytes_max=READ_BYTES)
            # The call may go on meanwhile: what is newer is not part of this view of it.
            runs = [each.until(call.durable) for each in runs if each.seq <= call.durable]
            if not runs:
                break
            missed += counted(runs, () if record is None else record.pages or ())
            after = runs[-1].last
            size += sum(len(run.body) for run in runs)
        fields = {name: getattr(call, name) for name in CallView.__struct_fields__}
        uncounted = max(0, call.pending - missed.total())
        return CallDetail(**fields, missed=dict(missed), uncounted=uncounted)

    async def messages(self, prefix: str, after: int, *, limit: int) -> MessagesFound:
        """The kept messages behind `after`, at most `limit`, and at most about 1 MiB of them."""
        stream = await self._registry.find(prefix)
        record = await self._registry.record(stream)
        if record is None:
            return MessagesFound((), None, 0)
        found: list[MessageView] = []
        size = 0
        while len(found) < limit and size < SENT_BYTES_MAX:
            runs = await self._registry.runs(stream, after, bytes_max=READ_BYTES)
            if not runs:
                break
            for each in views(runs, record.pages or ()):
                if len(found) < limit and size < SENT_BYTES_MAX and each.seq > after:
                    found.append(each)
                    size += each.size
            after = found[-1].seq
        is_end = not found or after >= record.last
        return MessagesFound(tuple(found), None if is_end else after, record.trimmed)
