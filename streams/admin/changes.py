"""The changes that operators may make: cancel a call, answer for its client, cut a connection.

A call is named by its whole streamId, which `Registry.find` has found for the operator's letters.
Each raises `HttpError` with a sentence for the operator where it cannot be made.
"""

from typing import Final

import msgspec

from streams import messages
from streams.admin.endpoint import journal_errors
from streams.engine.engine import Engine
from streams.engine.stream import Stream
from streams.errors import Refusal
from streams.exchange import HttpError
from streams.keys import SHOWN_LETTERS
from streams.logs import STREAM_LETTERS, log
from streams.messages import Message, RequestId
from streams.observe.registry import Registry

# MCP, on sampling: "User rejected sampling request" has this code in the example of the spec.
REJECTED: Final = -1


class Answering(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """An operator's answer to a question: a result, or an error with this text."""

    request_id: RequestId
    result: dict[str, msgspec.Raw] | msgspec.UnsetType = msgspec.UNSET
    error: str | msgspec.UnsetType = msgspec.UNSET

    def message(self) -> Message:
        """The answer as the client would send it. Raises `HttpError`."""
        if (self.result is msgspec.UNSET) == (self.error is msgspec.UNSET):
            raise HttpError(400, "Give either a result or an error.")
        if isinstance(self.error, str):
            refused = Refusal(REJECTED, self.error)
            return messages.parse(messages.error(self.request_id, refused))
        try:
            return messages.parse(messages.result(self.request_id, self.result))
        except Refusal as refused:  # nested too deeply
            raise HttpError(400, refused) from None


class Changes:
    """Changes to the calls and connections of one server."""

    def __init__(self, registry: Registry, engine: Engine) -> None:
        self._registry = registry
        self._engine = engine

    async def cancel(self, stream_id: str) -> str:
        """Cancel a call, whose client is told so. Returns its id, as operators see it."""
        stream = await self._loaded(stream_id)
        self._check_runs(stream)
        log.info("an operator cancels a call", stream=stream.id[:STREAM_LETTERS])
        self._engine.operations.stop(stream, is_told=True)
        return stream.id[:SHOWN_LETTERS]

    async def answer(self, stream_id: str, answer: Answering) -> str:
        """Answer an open question in place of the client. The first answer counts."""
        message = answer.message()
        stream = await self._loaded(stream_id)
        self._check_runs(stream)
        if answer.request_id not in stream.state.questions:
            raise HttpError(
                409, "The call has no such open question: it may be answered already. Look again."
            )
        log.info("an operator answers a question", stream=stream.id[:STREAM_LETTERS])
        self._engine.operations.answer_as(stream, message)
        return stream.id[:SHOWN_LETTERS]

    def cut(self, number: int) -> None:
        """Close a connection. Its client may come back at once, and resume."""
        connection = self._registry.connection(number)
        if connection is None:
            raise HttpError(404, f"There is no connection {number}: it may be closed already.")
        log.info("an operator cuts a connection", transport=connection.transport)
        connection.hang_up()

    async def _loaded(self, stream_id: str) -> Stream:
        """The stream of a call, also of one that another replica runs. Raises `HttpError`."""
        with journal_errors():
            stream = await self._engine.operations.load_call(stream_id)
        if stream is None:
            raise HttpError(404, f"The call {stream_id[:SHOWN_LETTERS]} is forgotten.")
        return stream

    @staticmethod
    def _check_runs(stream: Stream) -> None:
        state = stream.state
        if state.is_ended or state.is_tombstone:
            raise HttpError(409, f"The call has ended: it is {state.outcome.value}.")
