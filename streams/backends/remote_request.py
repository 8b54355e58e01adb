"""One request of a host, as it runs on a remote server: a stream of ours, and a call of the link's.

The messages of the call go into the stream as they came, but for ids and progress tokens. Questions
of the remote server are asked in the stream, and the answers go back. Where the stream outlives
this process, it has the ticket of the call, and how far that was passed on.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import trio

from streams import messages
from streams.backends import attribution
from streams.backends.attribution import CANCELLED, cancelled_id
from streams.backends.link import Link, RemoteCall
from streams.client import wire
from streams.client.call import RunningCall
from streams.engine.lifecycle import LIVE
from streams.engine.stream import Stream
from streams.errors import (
    INTERNAL_ERROR,
    CallFailed,
    CallLost,
    CannotConnect,
    ClientError,
    Ended,
    Fenced,
    Refusal,
    StreamGone,
    Superseded,
    Unavailable,
    refusal,
)
from streams.logs import log
from streams.messages import Kind, Message, RequestId, Run, mend, sound
from streams.protocol.ticket import Ticket

# How often a request that may run twice is sent in all, if its connection is lost each time.
ATTEMPTS_MAX: Final = 5

# A call of a server of ours is checkpointed with its first message, and then after so many messages
# or seconds. After a crash, no more than those come once more from the remote server.
CHECKPOINT_LINES: Final = 400
CHECKPOINT_S: Final = 0.25

CALL: Final = "tools/call"


class RemoteSession(Protocol):
    """The session with the remote server, as a request needs it."""

    link: Link
    relays: dict[RunningCall, "RemoteRequest"]  # the requests that run

    @property
    def url(self) -> str:
        """Names the server in errors."""

    def may_run_again(self, method: str, tool: str) -> bool:
        """Whether a request may be sent again after its connection was lost."""

    def unreachable(self, error: BaseException | None) -> Refusal:
        """The refusal of a request that the server never got."""

    def note_result(self, request: Message, result: Any) -> None:
        """The host gets this result."""

    def cancel(self, call: RemoteCall) -> None:
        """Have the server cancel a call, however long that takes."""

    def release(self, wait: Callable[[], Awaitable[None]]) -> None:
        """Wait for this in a task of its own, which keeps the session open."""


class _Untaken(CallLost):
    """The remote server has not taken the request."""


class Asking(Protocol):
    """A stream, or the place of what belongs to no request."""

    async def ask(
        self, method: str, params: Any, *, on_sent: Callable[[RequestId], object] | None = None
    ) -> Message:
        """Ask the host, and wait for the answer."""


class Question:
    """A request of the remote server, and the host's answer to it."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.is_sent = trio.Event()
        self._id: RequestId | None = None  # ours
        self._is_here = trio.Event()
        self._answer: Message | Refusal | None = Refusal(INTERNAL_ERROR, "The request has ended.")

    @property
    def is_answered(self) -> bool:
        """Whether there is an answer, or will be none."""
        return self._is_here.is_set()

    async def put(self, asking: Asking, message: Message) -> None:
        """Ask the host, and wait for the answer."""
        try:
            with self.scope:
                self._answer = await asking.ask(
                    str(message.method), message.params, on_sent=self._sent
                )
        except Refusal as refused:
            self._answer = refused
        finally:
            self.drop()

    def _sent(self, request_id: RequestId) -> None:
        self._id = request_id
        self.is_sent.set()

    def withdrawn(self, cancelled: Message) -> bytes | None:
        """End it without an answer. Returns the notification for the host, if it was asked."""
        self._answer = None
        self.scope.cancel()
        if self._id is None:
            return None
        ours: dict[str, Any] = {"requestId": self._id}
        with suppress(ValueError):  # a name that is no UTF-8: the id is enough for the host
            theirs = messages.decode(cancelled.params, dict[str, msgspec.Raw])
            line = sound(messages.notification(CANCELLED, theirs | ours).rstrip(b"\n"))
            if line is not None:  # else above 1 MiB, and no UTF-8
                return line + b"\n"
        return messages.notification(CANCELLED, ours)

    def drop(self) -> None:
        """Nothing more comes."""
        self.is_sent.set()
        self._is_here.set()

    async def wait(self) -> Message | None:
        """The answer; None where none is wanted any more. Raises `Refusal`."""
        await self._is_here.wait()
        if isinstance(self._answer, Refusal):
            raise self._answer
        return self._answer


class RemoteRequest:
    """One request of the host, as it runs on the remote server."""

    def __init__(self, guest: RemoteSession, request: Message, tool: str) -> None:
        self._guest = guest
        self._request = request
        self._method = str(request.method)
        self._tool = tool
        self._questions: dict[RequestId | None, Question] = {}
        self._open: list[Question] = []  # that the remote server may not have the answers of
        self._stream: Stream
        self._tasks: trio.Nursery
        self._turn = trio.Lock()  # held while a run is passed on, up to its checkpoint
        self._is_passing = False  # a run was handed out, and is not passed on yet
        self._lines = 0  # passed on since the last checkpoint
        self._checkpointed_at: float | None = None
        self._progress: float | None = None  # the most that was reported, before a rerun
        self._is_second = False

    async def run(self, stream: Stream, ticket: Ticket | None) -> tuple[bytes, bool]:
        """Run the request, or go on with it. Returns its response. Raises `Refusal`."""
        self._stream = stream
        attempts = 0
        while True:
            attempts += 1
            call = await self._begun(ticket)
            try:
                return await self._passed_on(call)
            except (CallLost, StreamGone, CannotConnect) as error:
                await self._guest.link.leave(call)
                if isinstance(error, StreamGone) and error.reason in ("too_large", "unreadable"):
                    raise refusal(error.reason).saying(str(error)) from None
                may_run_again = isinstance(error, _Untaken) or self._guest.may_run_again(
                    self._method, self._tool
                )
                is_over = isinstance(error, CannotConnect) or attempts >= ATTEMPTS_MAX
                if is_over or not may_run_again:
                    raise self._interrupted(error) from None
                log.info("a request is sent again", method=self._method, why=str(error))
                ticket, self._is_second = None, True
                await trio.sleep(min(2.0 ** (attempts - 2), 4.0))
            except Superseded as error:
                await self._guest.link.leave(call)
                raise refusal("superseded").saying(str(error)) from None
            except CallFailed as error:
                await self._guest.link.leave(call)
                failed = Refusal(error.code, error.message, error.data)
                return messages.error(stream.request_id, failed), True

    async def _begun(self, ticket: Ticket | None) -> RemoteCall:
        link, keeps = self._guest.link, self._stream.rerun is not None
        try:
            if ticket is not None:
                return await link.resume(ticket)
            return await link.begin(
                self._method,
                self._request.params,
                wants_progress=self._stream.is_progress_wanted,
                kept=0 if keeps else None,
            )
        except CannotConnect as error:
            raise self._guest.unreachable(error) from None
        except ClientError as error:
            raise self._interrupted(error) from None

    def _interrupted(self, error: ClientError) -> Refusal:
        return refusal("interrupted").saying(
            f"The connection to {self._guest.url} was lost, and the server cannot resume "
            f"this request: make it again if that is safe. ({error})"
        )

    async def _passed_on(self, call: RemoteCall) -> tuple[bytes, bool]:
        """Pass on all messages of the call. Raises `ClientError`."""
        guest = self._guest
        failure: ClientError | Refusal | None = None
        is_over = False
        guest.relays[call] = self
        self._is_passing = False
        try:
            async with trio.open_nursery() as self._tasks:
                if call.kept is not None and call.ticket is None:
                    self._tasks.start_soon(self._keep_ticket, call)
                try:
                    async for run in call.runs():
                        self._is_passing = True
                        async with self._turn:
                            await self._take(run)
                            await self._checkpoint(call)
                            self._is_passing = False
                except (ClientError, Refusal) as error:
                    failure = error
                self._tasks.cancel_scope.cancel()
            is_over = not isinstance(failure, Refusal)
        finally:
            del guest.relays[call]
            for question in self._questions.values():
                question.drop()
            if not is_over:
                self._leave_unfinished(call)
        if failure is not None:
            raise failure
        return self._response(call)

    def _leave_unfinished(self, call: RemoteCall) -> None:
        """The host does not want the call any more, or this process ends."""
        if self._stream.is_suspended:
            self._guest.link.keeps_session = True  # the next process goes on with it
        else:
            call.cancel_reason = self._stream.cancel_reason
            self._guest.cancel(call)

    def _response(self, call: RemoteCall) -> tuple[bytes, bool]:
        response = call.response
        is_error = response.kind is Kind.ERROR
        if is_error and (lost := wire.error_of(response)).reason in (wire.LOST, wire.UNTAKEN):
            kind = _Untaken if lost.reason == wire.UNTAKEN else CallLost
            raise kind(lost.message)
        self._guest.release(partial(self._release, call))
        if not is_error:
            self._guest.note_result(self._request, response.result)
            assert isinstance(response.result, msgspec.Raw)
            is_error = self._method == CALL and messages.is_tool_error(response.result)
        line = messages.answer(msgspec.structs.replace(response, id=self._stream.request_id))
        return _text(line), is_error

    async def _release(self, call: RemoteCall) -> None:
        """Let the remote server forget the call, once the response is safe here."""
        stream = self._stream
        try:
            if call.kept is not None:
                while stream.state.outcome is LIVE:
                    await trio.sleep(0.01)
                if not stream.is_deferred:
                    await stream.flush()
        except (Unavailable, Fenced) as error:  # this process ends, or another one has the call
            log.info("a response stays with the remote server", why=str(error))
        else:
            call.settle()
        await self._guest.link.leave(call)

    # Messages of the remote server

    async def _take(self, run: Run) -> None:
        self._open = [each for each in self._open if not each.is_answered]
        for line, message in zip(run.lines, _read(run), strict=True):
            match message.method:
                case wire.PROGRESS:
                    await self._report(message)
                case attribution.CANCELLED if message.kind is Kind.NOTIFICATION:
                    await self._withdraw(message)
                case _ if message.kind is Kind.REQUEST:
                    await self._ask(message)
                case _:
                    await self._stream.send(line)
        self._lines += run.count

    async def _report(self, message: Message) -> None:
        """Send progress under the host's token, if it wants any."""
        token = self._stream.progress_token
        try:
            params = messages.decode(message.params, dict[str, msgspec.Raw])
            progress = float(messages.decode(params.get("progress", b"null"), float))
        except ValueError:
            return  # nothing that a host could read
        if token is None or self._is_known(progress):
            return
        params["progressToken"] = msgspec.Raw(messages.encode(token))
        await self._stream.send_progress(token, messages.notification(wire.PROGRESS, params))

    def _is_known(self, progress: float) -> bool:
        """Whether a second attempt has come no further than the first. MCP: "The progress value
        MUST increase with each notification".
        """
        if self._is_second and self._progress is not None and progress <= self._progress:
            return True
        self._progress = progress
        return False

    async def _withdraw(self, message: Message) -> None:
        """The remote server does not want an answer any more."""
        question = self._questions.get(cancelled_id(message.params))
        if question is not None and (line := question.withdrawn(message)) is not None:
            await self._stream.send(line)

    async def _ask(self, message: Message) -> None:
        """Ask the host; returns when the question has its place in the stream."""
        assert isinstance(message.id, int | str)
        question = self._questions.setdefault(message.id, Question())
        self._open.append(question)
        self._tasks.start_soon(question.put, self._stream, message)
        await question.is_sent.wait()

    async def answer(self, message: Message, call: RemoteCall) -> Message | None:
        """See `Question.wait`."""
        assert isinstance(message.id, int | str)
        question = self._questions.setdefault(message.id, Question())
        if not call.is_numbered:  # else it is among the messages of the call
            self._tasks.start_soon(self._put_behind, call, message, question)
        try:
            return await question.wait()
        finally:
            self._questions.pop(message.id, None)

    async def _put_behind(self, call: RemoteCall, message: Message, question: Question) -> None:
        """Ask the host behind the messages that came before."""
        while call.has_unread:
            await trio.sleep(0.01)
        async with self._turn:
            pass  # they are passed on
        await question.put(self._stream, message)

    # For the next process

    async def _keep_ticket(self, call: RemoteCall) -> None:
        assert call.announced is not None
        await call.announced.wait()
        async with self._turn:
            if not self._is_passing:  # else the ticket counts a run that waits for its turn
                await self._checkpoint(call)

    async def _checkpoint(self, call: RemoteCall) -> None:
        """Keep the ticket of the call, and how far it is passed on.

        Not while the host has a question to answer: after a restart it must come once more.
        """
        ticket, now = call.ticket, trio.current_time()
        if call.kept is None or ticket is None or self._open:
            return
        last = self._checkpointed_at
        is_due = last is None or self._lines >= CHECKPOINT_LINES or now - last >= CHECKPOINT_S
        if not is_due:
            return
        with suppress(Ended):  # a host's cancel has ended the stream, and ends this task next
            await self._stream.checkpoint(messages.encode(str(ticket)))
        self._lines, self._checkpointed_at = 0, trio.current_time()
        if call.is_numbered:
            call.keep(ticket.after or 0)


def _read(run: Run) -> Sequence[Message]:
    """The messages of a run. Raises `StreamGone` where a line is no message."""
    try:
        run.body.decode()  # else msgspec accepts bytes that are no text
        found = messages.look_at_lines(run.body)
    except (ValueError, RecursionError):
        found = []
    if len(found) != run.count:
        raise StreamGone("The server sent a line that is no JSON-RPC message.", "unreadable")
    return found


def _text(line: bytes) -> bytes:
    """A response in UTF-8. Raises `Refusal` where it cannot be mended."""
    try:
        if not line.isascii():
            line.decode()  # msgspec does not check UTF-8 in values that it skips
    except ValueError:
        mended = mend(line.rstrip(b"\n"))
        if mended is None:
            why = "The server sent an answer that is no UTF-8, and is too long to be mended."
            raise refusal("unreadable").saying(why) from None
        return mended + b"\n"
    return line
