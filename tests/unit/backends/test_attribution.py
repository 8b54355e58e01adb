"""The request that a message of a server on stdio belongs to."""

from typing import Any

import pytest

from streams import messages
from streams.backends.attribution import (
    RELATED_TASK,
    SUBSCRIPTION,
    Attribution,
    key_of,
    with_id,
    with_subscription,
    with_token,
)
from streams.messages import encode, id_in, look


class Request:
    """A request in flight."""

    def __init__(self, number: int, task: str | None = None) -> None:
        self.number = number
        self.task = task
        self.is_cancelled = False
        self.follows = True

    def may_follow(self) -> bool:
        return self.follows


def table(*requests: Request) -> Attribution[Request]:
    made: Attribution[Request] = Attribution()
    made.requests = {each.number: each for each in requests}
    return made


def said(method: str, **params: Any) -> messages.Message:
    return look(messages.notification(method, params))


FIRST, SECOND, TASK = Request(1), Request(2), Request(3, "t")
NEWS = "notifications/tools/list_changed"


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (said("notifications/progress", progressToken=2, progress=1), SECOND),
        (said("notifications/progress", progressToken="2", progress=1), SECOND),
        (said("notifications/progress", progressToken=9, progress=1), None),
        (said("notifications/progress", progressToken=None), None),
        (said("notifications/progress", progressToken=[2]), None),
        (said("elicitation/create", _meta={RELATED_TASK: {"taskId": "t"}}), TASK),
        (said("elicitation/create", _meta={RELATED_TASK: {"taskId": "u"}}), None),
        (said("elicitation/create", _meta={RELATED_TASK: 7}), None),
        (said("notifications/tasks/status", taskId="t"), TASK),
        (said("notifications/x", _meta={SUBSCRIPTION: "1"}), FIRST),
        (said("notifications/x", _meta={SUBSCRIPTION: 2}), SECOND),
        (said("notifications/cancelled", requestId="q"), SECOND),
        (said("notifications/cancelled", requestId=["q"]), None),
        (said("notifications/message", data="taskId"), None),
        (said("notifications/x", _meta=5), None),
    ],
)
def test_a_name_tells_it_among_several(message: messages.Message, found: Any) -> None:
    requests = table(FIRST, SECOND, TASK)
    requests.questions["q"] = SECOND
    assert requests.of(message) is found


def test_the_only_request_is_meant_but_by_news_of_the_session() -> None:
    requests = table(FIRST)
    assert requests.of(said("notifications/message", data=1)) is FIRST
    assert requests.of(said("roots/list")) is FIRST
    assert requests.of(said(NEWS)) is None
    assert requests.of(said("notifications/resources/updated", uri="a:")) is None
    assert table().of(said("roots/list")) is None


def test_a_cancelled_request_makes_it_uncertain_while_it_may_follow() -> None:
    cancelled = Request(5)
    cancelled.is_cancelled = True
    requests = table(FIRST, cancelled)
    assert requests.of(said("roots/list")) is None
    cancelled.follows = False
    assert requests.of(said("roots/list")) is FIRST
    assert table(cancelled).of(said("roots/list")) is None


@pytest.mark.parametrize(
    ("head", "tail", "found"),
    [
        (b'{"jsonrpc":"2.0","id":5,"result":{"', b'"}}', 5),
        (b'{"id": 5, "jsonrpc": "2.0", "result":', b"}", 5),
        (b'{"result":{"x":"', b'"},"jsonrpc":"2.0","id":5}', 5),
        (b'{"result":{"x":"', b'"},"id":"q", "jsonrpc": "2.0"} ', "q"),
        (b'{"result":{"x":"', b'"},"a":{"id":5}}', None),
        (b'{"result":{"id":5,', b"}}", None),
        (b'{"jsonrpc":"2.0","id":05,"result"', b"}", None),
    ],
)
def test_the_ends_of_a_long_line_tell_its_id(head: bytes, tail: bytes, found: Any) -> None:
    assert id_in(head, tail) == found


def test_only_ids_and_tokens_are_replaced() -> None:
    line = b'{"result":{ "a" : 1.0 },"id" : 7,"x":null,"jsonrpc":"2.0"}'
    assert with_id(line, "q") == b'{"result":{ "a" : 1.0 },"id":"q","x":null,"jsonrpc":"2.0"}\n'
    told = b'{"method":"m","params":{"progressToken": 7 ,"message":"\\"progressToken\\":7"}}'
    assert (
        with_token(told, "t") == told.replace(b'"progressToken": 7', b'"progressToken":"t"') + b"\n"
    )
    nested = b'{"params":{"a":{"progressToken":7},"progressToken":7}}'
    assert with_token(nested, 3) == b'{"params":{"a":{"progressToken":7},"progressToken":3}}\n'
    meta = {"params": {"_meta": {SUBSCRIPTION: 7, "b": [1]}}}
    found = messages.decode(with_subscription(encode(meta), "mine"), dict[str, Any])
    assert found == {"params": {"_meta": {SUBSCRIPTION: "mine", "b": [1]}}}


def test_the_latest_of_each_kind_and_uri_has_one_key() -> None:
    updated = "notifications/resources/updated"
    keys = {
        key_of(NEWS, said(NEWS).params),
        key_of(updated, said(updated, uri="a:1").params),
        key_of(updated, said(updated, uri="a:2").params),
        key_of("notifications/tasks/status", said("x", taskId="t").params),
    }
    assert len(keys) == 4
