"""Requests and notifications of clients that MCP does not know, and their handlers.

A request gets a stream of its own, as a call of a tool does. So its handler has a `Call`, and the
request can be cancelled, cut and resumed. It is not restarted when the server has died.
"""

import inspect
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from streams import messages
from streams.engine.lifecycle import ProgressToken
from streams.errors import INVALID_PARAMS, Refusal
from streams.faults import is_failure, log_failure, text_of
from streams.logs import log
from streams.protocol import dialects, extension
from streams.schemas.forms import model_reader
from streams.schemas.inputs import GivenSchema, patterned_arguments
from streams.schemas.signatures import innermost, is_async
from streams.schemas.workers import Workers
from streams.server.call import Call, Context

NAME_LETTERS_MAX: Final = 200

# Of all revisions of MCP, in both directions. Other names are free, such as `acme/search`.
MCP_NAMES: Final = frozenset(
    [
        "initialize",
        "ping",
        "server/discover",
        "subscriptions/listen",
        "logging/setLevel",
        "completion/complete",
        "tools/list",
        "tools/call",
        "prompts/list",
        "prompts/get",
        "resources/list",
        "resources/read",
        "resources/subscribe",
        "resources/unsubscribe",
        "resources/templates/list",
        "roots/list",
        "sampling/createMessage",
        "elicitation/create",
        "tasks/get",
        "tasks/list",
        "tasks/result",
        "tasks/cancel",
        "tasks/update",
        "notifications/initialized",
        "notifications/cancelled",
        "notifications/progress",
        "notifications/message",
        "notifications/tools/list_changed",
        "notifications/prompts/list_changed",
        "notifications/resources/list_changed",
        "notifications/resources/updated",
        "notifications/roots/list_changed",
        "notifications/elicitation/complete",
        "notifications/subscriptions/acknowledged",
        "notifications/tasks/status",
    ]
)
_RESERVED: Final = ("rpc.", "mcp-streams/")  # by JSON-RPC, and by this project
_NAME: Final = re.compile(rf"[!-~]{{1,{NAME_LETTERS_MAX}}}")

Function = Callable[..., Awaitable[Any]]


class Method(msgspec.Struct, frozen=True):
    """The handler of a request or of a notification."""

    name: str
    function: Function
    roles: tuple[str, ...]  # of its parameters: `context` or `params`
    is_typed: bool  # else its params have `_meta` as well
    decode: Callable[[bytes], Any]
    patterned: GivenSchema | None  # of params with patterns, which msgspec matches by `re`

    async def check(self, given: msgspec.Raw, workers: Workers, principal: str) -> None:
        """Let a worker match params with patterns where that is costly; `read` does it otherwise.

        Raises `Refusal` where they do not fit.
        """
        schema = self.patterned
        if schema is None or not schema.is_costly(len(bytes(given))):
            return
        try:
            await workers.check(schema.encoded, self._wrapped(given), "params", principal)
        except (ValueError, RecursionError) as error:
            raise self._refusal(text_of(error)) from None

    def read(self, given: msgspec.Raw) -> Any:
        """The params in the handler's type. Raises `Refusal` where they do not fit."""
        if "params" not in self.roles:
            return None
        schema = self.patterned
        try:
            if schema is not None and not schema.is_costly(len(bytes(given))):
                schema.check(messages.decode(self._wrapped(given), Any), "params")
            return self.decode(self._own(given))
        except (ValueError, RecursionError) as error:
            why = text_of(error)
        except BaseException as error:  # of the author's types
            if not is_failure(error):
                raise
            log_failure("the params of a method cannot be made", error, method=self.name)
            why = "they cannot be read"
        raise self._refusal(why)

    def _own(self, given: msgspec.Raw) -> bytes:
        return _without_meta(bytes(given)) if self.is_typed else bytes(given)

    def _wrapped(self, given: msgspec.Raw) -> bytes:
        """The params as `patterned` has them."""
        return b'{"params":' + self._own(given) + b"}"

    def _refusal(self, why: str) -> Refusal:
        short = " ".join(why.split())[:500]
        return Refusal(INVALID_PARAMS, f"Bad params of {self.name}: {short}.")

    async def run(self, context: Context, params: Any) -> Any:
        """Run the handler."""
        given = {"context": context, "params": params}
        return await self.function(*(given[role] for role in self.roles))


class Methods:
    """The handlers of a server, by the names of their methods."""

    def __init__(self) -> None:
        self.requests: dict[str, Method] = {}
        self.notifications: dict[str, Method] = {}

    def add(self, name: str, function: Function, *, is_request: bool) -> None:
        """Add a handler. Raises `TypeError` or `ValueError` where it cannot be one."""
        what = f"{'method' if is_request else 'notification'} {name}"
        _check_name(name, what)
        if name in self.requests or name in self.notifications:
            raise ValueError(f"{what}: it has a handler already")
        taken = self.requests if is_request else self.notifications
        taken[name] = _method(name, function, what, Call if is_request else Context)


def _check_name(name: str, what: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{what}: expected 1 to {NAME_LETTERS_MAX} visible ASCII characters")
    proposals = {*dialects.method_names(), extension.ACK, messages.POSITION}
    if name in MCP_NAMES:
        raise ValueError(f"{what}: the name belongs to MCP")
    if name in proposals:
        raise ValueError(f"{what}: the name belongs to a proposal for resumable streams")
    if name.startswith(_RESERVED):
        raise ValueError(f"{what}: names that begin with {' or '.join(_RESERVED)} are reserved")


def _method(name: str, function: Function, what: str, context: type[Context]) -> Method:
    innermost(function)  # raises for what cannot be called
    if not is_async(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{what}: the handler must be an async function")
    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise TypeError(f"{what}: cannot read the signature: {error}") from error
    roles: list[str] = []
    kind: Any = dict[str, Any]
    for parameter in signature.parameters.values():
        if parameter.kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise TypeError(f"{what}: {parameter.name}: expected plain parameters")
        annotation = parameter.annotation
        if isinstance(annotation, type) and issubclass(annotation, Context):
            if not issubclass(context, annotation):
                raise TypeError(f"{what}: {parameter.name}: a notification has only a Context")
            roles.append("context")
            continue
        roles.append("params")
        if annotation is not inspect.Parameter.empty:
            kind = annotation
    if len(set(roles)) < len(roles):
        raise TypeError(f"{what}: expected a {context.__name__} and the params, each at most once")
    is_typed = isinstance(kind, type) and not issubclass(kind, dict)
    return Method(name, function, tuple(roles), is_typed, *_decoder(kind, what))


def _decoder(kind: Any, what: str) -> tuple[Callable[[bytes], Any], GivenSchema | None]:
    """The function that reads the params, and the schema of those with patterns."""
    try:
        if (reader := model_reader(kind, "params")) is not None:
            return reader.read, None
        decode = msgspec.json.Decoder(kind).decode
        whole = inspect.Parameter("params", inspect.Parameter.KEYWORD_ONLY, annotation=kind)
        return decode, patterned_arguments([whole], None, "params")
    except (TypeError, ValueError, NameError, RuntimeError) as error:  # pydantic's is the last
        raise TypeError(f"{what}: params: {str(error).splitlines()[-1]}") from error


def _without_meta(params: bytes) -> bytes:
    """The params without `_meta`, which belongs to MCP, and which a type may forbid."""
    if b'"_meta"' not in params or not params.lstrip().startswith(b"{"):
        return params
    members = messages.decode(params, dict[str, msgspec.Raw])
    members.pop("_meta", None)
    return messages.encode(members)


class _Meta(msgspec.Struct, rename="camel"):
    progress_token: ProgressToken | None = None


class _WithMeta(msgspec.Struct):
    meta: _Meta = msgspec.field(name="_meta", default_factory=_Meta)


def log_dropped(method: str, refused: Refusal) -> None:
    """Log a notification that cannot be taken. It has no answer."""
    log.info("a notification was dropped", method=method, why=refused.message[:200])


def progress_token(params: msgspec.Raw) -> ProgressToken | None:
    """The progress token of a request, if it has one."""
    if b"progressToken" not in bytes(params):
        return None
    try:
        return messages.decode(params, _WithMeta).meta.progress_token
    except ValueError:
        return None
