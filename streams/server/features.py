"""Resources, prompts and completions as requests: what each method lists, changes or runs.

Reads, prompts and completions run an author's function, so they run like calls: each is a stream,
beside the connection, and a client may cancel it. But it cannot be resumed, since the client loses
nothing when it asks again: it ends with its connection.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from streams.engine.connection import Session
from streams.engine.lifecycle import ProgressToken
from streams.errors import INVALID_PARAMS, Refusal
from streams.messages import Message
from streams.protocol.vocabulary import read_params
from streams.schemas.arguments import Callee, Values
from streams.schemas.inputs import is_required
from streams.schemas.signatures import Signature, is_async
from streams.server.listing import Listing
from streams.server.prompts import Prompt
from streams.server.resources import Resource, Resources, contents_of, unsubscribe

# MCP, Completion: "Maximum 100 items per response".
VALUES_MAX: Final = 100


class Function(Protocol):
    """An author's function. It is given the running call first if `takes_call`."""

    @property
    def function(self) -> Callable[..., Any]: ...
    @property
    def is_async(self) -> bool: ...
    @property
    def takes_call(self) -> bool: ...
    @property
    def name(self) -> str: ...


class Work(msgspec.Struct, frozen=True):
    """The function that a request runs, its arguments, and what becomes of its value."""

    what: str  # for errors and the log
    callee: Function
    result: Callable[[Any], Any]
    values: Values | None = None  # of a `Callee`, by name
    positional: Sequence[Any] = ()
    uri: str = ""  # of a resource
    progress_token: ProgressToken | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Values that complete an argument: at most 100 are sent. `total` counts all that there are."""

    values: Iterable[str]
    total: int | None = None
    has_more: bool | None = None


class Reference(msgspec.Struct, frozen=True):
    """The owner of the argument: a prompt (`ref/prompt`) or a resource (`ref/resource`)."""

    type: str
    name: str = ""  # of a prompt
    uri: str = ""  # of a resource, or its template


class CompletionArgument(msgspec.Struct, frozen=True):
    """The argument to complete, and what the user has typed of it."""

    name: str
    value: str


class CompletionContext(msgspec.Struct, frozen=True):
    """The other arguments, as far as the user has filled them in."""

    arguments: dict[str, str] = {}


class Completer(msgspec.Struct, frozen=True):
    """A function that completes arguments."""

    function: Callable[..., Any]
    is_async: bool = False
    takes_call: bool = False
    count: int = 0  # of the values that it takes
    name: str = "completion"


class _Meta(msgspec.Struct, rename="camel"):
    progress_token: ProgressToken | None = None


class _Uri(msgspec.Struct):
    uri: str
    meta: _Meta = msgspec.field(default_factory=_Meta, name="_meta")


class _Get(msgspec.Struct):
    name: str
    arguments: dict[str, str] | None = None
    meta: _Meta = msgspec.field(default_factory=_Meta, name="_meta")


class _Complete(msgspec.Struct):
    ref: Reference
    argument: CompletionArgument
    context: CompletionContext | None = None
    meta: _Meta = msgspec.field(default_factory=_Meta, name="_meta")


class Features:
    """All resources, prompts and completers of a server."""

    def __init__(self) -> None:
        self.resources = Resources()
        self.prompts: Listing[Prompt] = Listing("prompt")
        self._completers: dict[tuple[str, str] | None, Completer] = {}
        self._completes = False  # an argument can be completed, or could

    def add_resource(self, resource: Resource) -> None:
        """Add a resource. Raises `ValueError` where another one has its URI."""
        self.resources.add(resource)
        self._completes |= _has_choices(resource.callee)

    def add_prompt(self, prompt: Prompt) -> None:
        """Add a prompt. Raises `ValueError` where another one has its name."""
        self.prompts.add(prompt)
        self._completes |= _has_choices(prompt.callee)

    def add_completer(self, function: Callable[..., Any], of: tuple[str, str] | None) -> None:
        """Complete one argument, given as the name or template of its owner and its own name.

        With None the function completes all that no other function completes. Raises `TypeError`
        for a function that cannot be called so, `ValueError` for a second one.
        """
        what = "completion" if of is None else f"completion of {of[1]} of {of[0]}"
        if of in self._completers:
            raise ValueError(f"{what}: there is one already")
        accepted = Signature.of(function, what)
        most = 3 if of is None else 2
        given = [each for each in accepted.parameters if each.kind is not each.KEYWORD_ONLY]
        needed = {each.name for each in accepted.parameters if is_required(each)}
        filled = {each.name for each in given[:most]}
        if not given or needed - filled or accepted.variadic is not None:
            known = "ref, argument and context" if of is None else "the value and the arguments"
            raise TypeError(f"{what}: the function is given {known}")
        takes_call = accepted.call_name is not None
        count = min(most, len(given))
        self._completers[of] = Completer(function, is_async(function), takes_call, count)
        self._completes = True

    def capabilities(self) -> dict[str, Any]:
        """The capabilities of `initialize`: of what the server has."""
        found: dict[str, Any] = {}
        if self.resources.is_used:
            found["resources"] = {"subscribe": True, "listChanged": True}
        if self.prompts.is_used:
            found["prompts"] = {"listChanged": True}
        if self._completes:
            found["completions"] = {}
        return found

    # Requests

    def methods(self) -> dict[str, str]:
        """The methods that the server has: those that `list` or `change` something, or `run`."""
        found: dict[str, str] = {}
        if self.resources.is_used:
            found |= _RESOURCES
        if self.prompts.is_used:
            found |= _PROMPTS
        if self._completes:
            found |= _COMPLETIONS
        return found

    def list(self, method: str, cursor: str | None, size: int) -> dict[str, Any]:
        """The result of a method that lists something. Raises `ValueError` for a bad cursor."""
        lists: dict[str, tuple[str, Listing[Any]]] = {
            "resources/list": ("resources", self.resources.single),
            "resources/templates/list": ("resourceTemplates", self.resources.templates),
            "prompts/list": ("prompts", self.prompts),
        }
        key, entries = lists[method]
        found, following = entries.page(cursor, size)
        return {key: found} if following is None else {key: found, "nextCursor": following}

    def change(self, session: Session, message: Message) -> None:
        """Subscribe a session to a resource, or unsubscribe it. Raises `Refusal`."""
        uri = read_params(message.params, _Uri).uri
        if message.method == "resources/subscribe":
            self.resources.subscribe(session, uri)
        else:
            unsubscribe(session, uri)

    def work(self, message: Message) -> Work:
        """The work of a read, a prompt or a completion. Raises `Refusal`."""
        match message.method:
            case "resources/read":
                return self._read(read_params(message.params, _Uri))
            case "prompts/get":
                return self._get(read_params(message.params, _Get))
            case _:
                return self._complete(read_params(message.params, _Complete))

    def _read(self, params: _Uri) -> Work:
        resource, values = self.resources.find(params.uri)
        return Work(
            what=f"resource {params.uri[:200]}",
            callee=resource.callee,
            result=contents_of(params.uri, resource),
            values=values,
            uri=params.uri,
            progress_token=params.meta.progress_token,
        )

    def _get(self, params: _Get) -> Work:
        prompt = self.prompts.get(params.name)
        if prompt is None:
            raise Refusal(
                INVALID_PARAMS, f"Unknown prompt {params.name[:100]!r}: see prompts/list."
            )
        return Work(
            what=f"prompt {prompt.key}",
            callee=prompt.callee,
            result=prompt.result,
            values=params.arguments or {},
            progress_token=params.meta.progress_token,
        )

    def _complete(self, params: _Complete) -> Work:
        name, typed = params.argument.name, params.argument.value
        owner = self._owner(params.ref)
        if name not in owner.input_schema["properties"]:
            what = f"{params.ref.name or params.ref.uri}"[:200]
            raise Refusal(INVALID_PARAMS, f"Unknown argument {name[:100]!r} of {what!r}.")
        choices = [each for each in owner.choices(name) if _begins(each, typed)]
        key = params.ref.name if params.ref.type == "ref/prompt" else params.ref.uri
        completer = self._completers.get((key, name))
        positional: tuple[Any, ...]
        if completer is not None:
            known = params.context.arguments if params.context else {}
            positional = (typed, known)
        else:
            completer = self._completers.get(None, Completer(_nothing, is_async=True))
            positional = (params.ref, params.argument, params.context)
        return Work(
            what=f"completion of {name[:100]}",
            callee=completer,
            result=partial(_completed, choices),
            positional=positional[: completer.count],
            progress_token=params.meta.progress_token,
        )

    def _owner(self, ref: Reference) -> Callee:
        if ref.type == "ref/prompt":
            prompt = self.prompts.get(ref.name)
            if prompt is not None:
                return prompt.callee
            raise Refusal(INVALID_PARAMS, f"Unknown prompt {ref.name[:100]!r}: see prompts/list.")
        if ref.type == "ref/resource":
            found = self.resources.templates.get(ref.uri) or self.resources.single.get(ref.uri)
            if found is not None:
                return found.callee
            raise Refusal(
                INVALID_PARAMS,
                f"Unknown resource template {ref.uri[:200]!r}: see resources/templates/list.",
            )
        raise Refusal(INVALID_PARAMS, f"Unknown type of reference {ref.type[:100]!r}.")


_RESOURCES: Final = {
    "resources/list": "list",
    "resources/templates/list": "list",
    "resources/read": "run",
    "resources/subscribe": "change",
    "resources/unsubscribe": "change",
}
_PROMPTS: Final = {"prompts/list": "list", "prompts/get": "run"}
_COMPLETIONS: Final = {"completion/complete": "run"}
RUN: Final = frozenset({"resources/read", "prompts/get", "completion/complete"})


async def _nothing() -> None:
    """No function completes the argument: its type may list its values."""


def _has_choices(callee: Callee) -> bool:
    return any(map(callee.choices, callee.input_schema["properties"]))


def _begins(choice: str, typed: str) -> bool:
    return choice.casefold().startswith(typed.casefold())


def _completed(choices: Sequence[str], value: Any) -> dict[str, Any]:
    """The result of a completion, from what a completer has returned; None: the choices."""
    if value is None:
        value = choices
    if isinstance(value, dict) and "values" in value:
        value = msgspec.convert(value, Completion)
    whole = value if isinstance(value, Completion) else Completion(values=value)
    values = whole.values
    is_list = isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping)
    found = list(itertools.islice(values, VALUES_MAX + 1)) if is_list else [None]
    if not all(isinstance(each, str) for each in found):
        raise TypeError(f"a completion is a list of str, not {values!r:.100}")
    count = len(values) if isinstance(values, Sized) else None
    total = whole.total if whole.total is not None else count
    has_more = len(found) > VALUES_MAX or bool(whole.has_more)
    told = {"values": found[:VALUES_MAX], "hasMore": has_more}
    return {"completion": told if total is None else told | {"total": total}}
