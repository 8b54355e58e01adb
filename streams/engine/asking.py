"""What a handler asks the client, and where it waits for the answer."""

from typing import TYPE_CHECKING, Any

import trio

from streams import messages
from streams.keys import new_request_id
from streams.messages import Message, RequestId

if TYPE_CHECKING:
    from streams.engine.session import Session
    from streams.engine.stream import Stream


class Answer:
    """The client's, to one request of a stream."""

    __slots__ = ("_is_here", "_message", "asked", "stream")

    def __init__(self, stream: "Stream") -> None:
        self.stream = stream
        self.asked: set[Session] = set()  # whom the request went to
        self._is_here = trio.Event()
        self._message: Message | None = None

    def give(self, message: Message) -> None:
        """Hand over the client's answer."""
        self._message = message
        self._is_here.set()

    async def wait(self) -> Message:
        """The client's answer, when it is here."""
        await self._is_here.wait()
        assert self._message is not None
        return self._message


class Asking:
    """The requests of one stream to its client. `answers` are those that any stream waits for."""

    __slots__ = ("_answers", "_stream")

    def __init__(self, stream: "Stream", answers: dict[RequestId, Answer]) -> None:
        self._stream = stream
        self._answers = answers

    async def ask(self, method: str, params: Any) -> Message:
        """Send a request to the client and wait for the answer, over however many connections."""
        stream = self._stream
        before = None if stream.rerun is None else await stream.rerun.asked(method, params)
        request_id, answer = before or (new_request_id(), Answer(stream))
        try:
            if before is None:
                self._answers[request_id] = answer
                line = messages.request(request_id, method, params)
                await stream.send_request(request_id, line)
            return await answer.wait()
        finally:
            self._answers.pop(request_id, None)
            stream.state.questions.pop(request_id, None)

    def note(self, session: "Session", seq: int) -> None:
        """The unanswered requests up to `seq` went to this client: it may answer them."""
        for request_id, question in self._stream.state.questions.items():
            if question.seq <= seq:
                self._answers[request_id].asked.add(session)

    def answered(self, answer: Answer, seq: int, message: Message) -> None:
        """The client has answered the request at `seq`."""
        if self._stream.rerun is None:
            answer.give(message)
        else:
            self._stream.rerun.keep(answer, seq, message)
