"""Finds the request that a message of a server on stdio belongs to: the server does not name it.

A response belongs to the request of its id. For all other messages, the first of these rules holds:

1. Progress belongs to the request of its progress token.
2. The cancellation of a question belongs to the request that the question belongs to.
3. A message about a task belongs to the request that asks for this task.
4. A message with a subscription id belongs to the request of this id.
5. An update of a resource, a change of a list and news of a task belong to the session, whichever
   calls run.
6. Any other message belongs to the only request in flight.

A message belongs to the session if the rule finds no request, except for progress: that is
dropped.
"""

import re
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from streams import messages
from streams.messages import Message, RequestId, id_in

PROGRESS: Final = "notifications/progress"
CANCELLED: Final = "notifications/cancelled"
LOG: Final = "notifications/message"
UPDATED: Final = "notifications/resources/updated"
RELATED_TASK: Final = "io.modelcontextprotocol/related-task"
SUBSCRIPTION: Final = "io.modelcontextprotocol/subscriptionId"
# Parts of the names of news: see `is_news`.
_TASKS: Final = "notifications/tasks/"
_CHANGED: Final = "/list_changed"


class Related(msgspec.Struct):
    """The `_meta` of a message of a server, as far as it names a request."""

    task: Any = msgspec.field(name=RELATED_TASK, default=None)
    subscription: Any = msgspec.field(name=SUBSCRIPTION, default=None)


class _Params(msgspec.Struct, rename="camel"):
    progress_token: Any = None
    request_id: Any = None
    task_id: Any = None
    meta: Related = msgspec.field(name="_meta", default_factory=Related)


class InFlight(Protocol):
    """A request that a child has not answered."""

    number: int  # its id, and its progress token, at the child
    task: str | None  # the task that it asks about

    @property
    def is_cancelled(self) -> bool:
        """Whether its client does not wait for it any more."""

    def may_follow(self) -> bool:
        """Whether messages of a cancelled request may still come."""


_Request = TypeVar("_Request", bound=InFlight)


class Attribution(Generic[_Request]):
    """The requests in flight at one child, and the rules that attribute messages to them."""

    def __init__(self) -> None:
        self.requests: dict[int, _Request] = {}  # by their ids at the child
        self.questions: dict[RequestId, _Request | None] = {}  # of the child, by its ids

    def of(self, message: Message) -> _Request | None:
        """The request that a notification or a question of the child belongs to, if any."""
        method = str(message.method)
        raw = bytes(message.params)
        if method == PROGRESS:
            return self.named(_read(raw).progress_token)
        if b'"_meta"' in raw or method == CANCELLED or method.startswith(_TASKS):
            params = _read(raw)
            if method == CANCELLED:
                return self._asked(params.request_id)
            if (task := task_in(params)) is not None:
                return next((each for each in self.requests.values() if each.task == task), None)
            if params.meta.subscription is not None:
                return self.named(params.meta.subscription)
        return None if is_news(method) else self.only

    def named(self, number: Any) -> _Request | None:
        """The request of this id. A server may have made a string of it."""
        if isinstance(number, str) and number.isascii() and number.isdigit():
            number = int(number[:18])
        return self.requests.get(number) if isinstance(number, int) else None

    def _asked(self, question: Any) -> _Request | None:
        return self.questions.get(question) if isinstance(question, int | str) else None

    @property
    def only(self) -> _Request | None:
        """The only request in flight; None unless there is just one.

        A request that was cancelled is never returned. But the child may still send messages of
        it. As long as it may, no other request counts as the only one.
        """
        found: _Request | None = None
        for request in self.requests.values():
            if not request.is_cancelled:
                if found is not None:
                    return None
                found = request
            elif request.may_follow():
                return None
        return found

    def of_long(self, head: bytes, tail: bytes) -> _Request | None:
        """The request that is answered by a line of which only the ends are known."""
        number = id_in(head, tail)
        return self.only if number is None else self.named(number)


def task_in(params: _Params) -> str | None:
    """The task that a message is about."""
    related = params.meta.task
    task = related.get("taskId") if isinstance(related, dict) else params.task_id
    return task if isinstance(task, str) else None


def task_of(params: msgspec.Raw) -> str | None:
    """The task that the params of a request or notification name."""
    return task_in(_read(bytes(params))) if b'"taskId"' in bytes(params) else None


def key_of(method: str, params: msgspec.Raw) -> str:
    """The name under which only the latest notification is kept for a client that is away."""
    if method == UPDATED:
        return f"{method} {uri_of(params)}"
    task = task_of(params) if method.startswith(_TASKS) else None
    return method if task is None else f"{method} {task}"


def cancelled_id(params: msgspec.Raw) -> RequestId | None:
    """The id of the request that `notifications/cancelled` names."""
    found = _read(bytes(params)).request_id
    return found if isinstance(found, int | str) else None


class _Uri(msgspec.Struct):
    uri: str = ""


def uri_of(params: msgspec.Raw) -> str:
    """The URI in the params of a notification; empty without one."""
    try:
        return messages.decode(params, _Uri).uri
    except ValueError:
        return ""


def is_task_news(method: str) -> bool:
    """Whether a notification is about a task."""
    return method.startswith(_TASKS)


def is_news(method: str) -> bool:
    """Whether a notification belongs to the session, unless it names a request.

    Only the latest of its kind matters to a client that was away.
    """
    return method == UPDATED or method.endswith(_CHANGED) or method.startswith(_TASKS)


def _read(params: bytes) -> _Params:
    try:
        return messages.decode(params, _Params)
    except ValueError:
        return _Params()


# Ids and tokens


_TOKEN: Final = re.compile(rb'"progressToken"\s*:\s*"?[0-9]+"?(?=\s*[,}])')


def with_id(line: bytes, request_id: RequestId) -> bytes:
    """A line with another id. All other members keep their bytes and their order."""
    members = messages.decode(line, dict[str, msgspec.Raw])
    members["id"] = msgspec.Raw(messages.encode(request_id))
    return messages.encode(members) + b"\n"


def with_token(line: bytes, token: RequestId) -> bytes:
    """A line of progress with another token."""
    encoded = b'"progressToken":' + messages.encode(token)
    if line.count(b'"progressToken"') == 1:
        replaced, count = _TOKEN.subn(lambda _: encoded, line)
        if count == 1:
            return replaced + b"\n"
    return with_member(line, ("params", "progressToken"), token)


def with_subscription(line: bytes, request_id: RequestId) -> bytes:
    """A line whose subscription id, the id of a request, is the client's."""
    return with_member(line, ("params", "_meta", SUBSCRIPTION), str(request_id))


def with_member(line: bytes, path: tuple[str, ...], value: Any) -> bytes:
    """A line in which one member, some levels deep, has another value."""
    return bytes(_replaced(line, path, value)) + b"\n"


def _replaced(raw: bytes | msgspec.Raw, path: tuple[str, ...], value: Any) -> msgspec.Raw:
    if not path:
        return msgspec.Raw(messages.encode(value))
    members = messages.decode(raw, dict[str, msgspec.Raw])
    members[path[0]] = _replaced(members.get(path[0], b"{}"), path[1:], value)
    return msgspec.Raw(messages.encode(members))
