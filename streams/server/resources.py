"""Resources: data that clients read by URI, and subscribe to.

A function is one resource, or with a URI template any number of them: the values in the URI are its
arguments. It runs for each read. Its value becomes the contents:

    str                                       text, as text/plain
    bytes                                     blob, as application/octet-stream
    ResourceContents, a list with some        these contents
    any other value that is JSON              text, as application/json

`mime_type` of the resource takes the place of these types.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, TypedDict

import msgspec

from streams.engine.connection import Session
from streams.engine.notices import resource_updated
from streams.errors import INVALID_PARAMS, Refusal, ResourceNotFound
from streams.schemas.arguments import Callee, Values, json_text, make_callee, name_of
from streams.schemas.content import Annotations, Icon, ResourceContents
from streams.server.listing import Listing, icons_of
from streams.server.templates import (
    URI_LETTERS_MAX,
    UnsafeValue,
    UriTemplate,
    check_uri,
    is_template,
)

# Of one session, in memory and in its record in the journal. An editor that watches each open file
# has some hundreds. A change of each of them fits into the limits of `streams.engine.notices`.
SUBSCRIPTIONS_MAX: Final = 1_000
SUBSCRIPTION_BYTES_MAX: Final = 64 * 1024


class ResourceSettings(TypedDict, total=False):
    """The keywords of `Server.resource`. `DEFAULTS` has the values of those that are left out."""

    name: str | None  # by default the function's
    title: str | None
    description: str | None  # by default the docstring
    mime_type: str | None
    size: int | None  # in bytes, where it is known
    annotations: Annotations | None
    icons: Iterable[Icon] | None
    meta: dict[str, Any] | None


DEFAULTS: Final[ResourceSettings] = {
    "name": None,
    "title": None,
    "description": None,
    "mime_type": None,
    "size": None,
    "annotations": None,
    "icons": None,
    "meta": None,
}


class Resource(msgspec.Struct, frozen=True, eq=False):
    """One resource, or all those of a template."""

    uri: str
    template: UriTemplate | None
    callee: Callee
    settings: ResourceSettings

    @property
    def key(self) -> str:
        """The URI or the template."""
        return self.uri

    def shown(self) -> dict[str, Any]:
        """The entry in `resources/list` or `resources/templates/list`."""
        settings, given = self.settings, self.settings["description"]
        entry = {
            "uri" if self.template is None else "uriTemplate": self.uri,
            "name": self.callee.name,
            "title": settings["title"],
            "description": self.callee.description if given is None else given,
            "mimeType": settings["mime_type"],
            "size": settings["size"],
            "annotations": settings["annotations"],
            "icons": settings["icons"],
            "_meta": settings["meta"],
        }
        return {name: value for name, value in entry.items() if value is not None}


def make_resource(uri: str, function: Callable[..., Any], given: ResourceSettings) -> Resource:
    """Inspect a function once, and report here everything that is wrong with it.

    Raises `TypeError` for a function that cannot be read by this URI and for an unknown setting,
    `ValueError` for a URI or a setting that cannot be used.
    """
    if unknown := given.keys() - DEFAULTS.keys():
        raise TypeError(f"unknown settings of a resource: {', '.join(sorted(unknown))}")
    if not isinstance(uri, str):
        raise TypeError('a resource needs a URI: @server.resource("config://app")')
    what = f"resource {uri}"
    settings: ResourceSettings = {**DEFAULTS, **given}
    settings["icons"] = icons_of(settings["icons"], what)
    size = settings["size"]
    if size is not None and (size < 0 or is_template(uri)):
        raise ValueError(f"{what}: size: expected bytes from 0, of a single resource, got {size}")
    if is_template(uri):
        template = UriTemplate(uri)
    else:
        check_uri(uri)
        template = None
    name = settings["name"] or name_of(function, what)
    callee = make_callee(function, name, what)
    _require_same_names(callee, template, what)
    return Resource(uri, template, callee, settings)


def _require_same_names(callee: Callee, template: UriTemplate | None, what: str) -> None:
    taken = set(callee.input_schema["properties"])
    names = frozenset() if template is None else template.names
    if missing := names - taken:
        raise TypeError(f"{what}: the function has no parameter {', '.join(sorted(missing))}")
    optional = frozenset() if template is None else template.optional
    if unfilled := callee.required - (names - optional):
        unfilled_names = ", ".join(sorted(unfilled))
        why = "may be absent in a URI" if unfilled <= optional else "is not in the URI"
        raise TypeError(f"{what}: {unfilled_names} {why}: give the parameter a default")
    if extra := taken - names:
        raise TypeError(f"{what}: parameter {', '.join(sorted(extra))} is not in the URI")


class Resources:
    """The resources of a server, and its templates."""

    def __init__(self) -> None:
        self.single: Listing[Resource] = Listing("resource")
        self.templates: Listing[Resource] = Listing("resource template")

    @property
    def is_used(self) -> bool:
        """Whether the server has, or had, resources."""
        return self.single.is_used or self.templates.is_used

    def add(self, resource: Resource) -> None:
        """Add a resource. Raises `ValueError` where another one has its URI."""
        (self.single if resource.template is None else self.templates).add(resource)

    def remove(self, uri: str) -> None:
        """Remove a resource or a template. Raises `ValueError` for an unknown one."""
        (self.templates if is_template(uri) else self.single).remove(uri)

    def find(self, uri: str) -> tuple[Resource, Values]:
        """The resource of a URI, and the values in it.

        Raises `ResourceNotFound`, and another `Refusal` for a URI that is too long.
        """
        if len(uri) > URI_LETTERS_MAX:
            raise Refusal(
                INVALID_PARAMS,
                f"uri has {len(uri)} characters: send at most {URI_LETTERS_MAX}.",
            )
        if (found := self.single.get(uri)) is not None:
            return found, {}
        for each in self.templates:
            assert each.template is not None
            try:
                values = each.template.match(uri)
            except UnsafeValue as error:
                # No other template gets the URI, since it may check less.
                raise ResourceNotFound(f"Unsafe URI {uri[:200]!r}: {error}.", uri=uri) from None
            if values is not None:
                return each, values
        raise ResourceNotFound(uri=uri)

    def subscribe(self, session: Session, uri: str) -> None:
        """Tell this client when the resource changes. Raises `Refusal`."""
        self.find(uri)
        subscriptions = session.subscriptions
        if uri in subscriptions:
            return
        size = sum(len(each.encode()) for each in (*subscriptions, uri))
        if len(subscriptions) >= SUBSCRIPTIONS_MAX or size > SUBSCRIPTION_BYTES_MAX:
            raise Refusal(
                INVALID_PARAMS,
                f"Too many subscriptions: a session has at most {SUBSCRIPTIONS_MAX}, of "
                f"{SUBSCRIPTION_BYTES_MAX} bytes. Unsubscribe from some.",
            )
        subscriptions[uri] = None
        session.has_changed = True


def unsubscribe(session: Session, uri: str) -> None:
    """Tell this client no more about the resource, which it may not have subscribed to."""
    if uri in session.subscriptions:
        del session.subscriptions[uri]
        session.notices.drop(resource_updated(uri)[1])
        session.has_changed = True


def contents_of(uri: str, resource: Resource) -> Callable[[Any], dict[str, Any]]:
    """Returns a function that makes the result of a read from the reader's value."""
    return partial(_contents, uri, resource)


def _contents(uri: str, resource: Resource, value: Any) -> dict[str, Any]:
    mime_type = resource.settings["mime_type"]
    if isinstance(value, ResourceContents):
        value = [value]
    if isinstance(value, list | tuple) and any(
        isinstance(each, ResourceContents) for each in value
    ):
        return {"contents": [_content(uri, each, mime_type) for each in value]}
    return {"contents": [_content(uri, value, mime_type)]}


def _content(uri: str, value: Any, mime_type: str | None) -> ResourceContents:
    if isinstance(value, ResourceContents):
        return value
    if isinstance(value, str):
        return ResourceContents(uri, text=value, mime_type=mime_type or "text/plain")
    if isinstance(value, bytes | bytearray | memoryview):
        blob = bytes(value)
        return ResourceContents(uri, blob=blob, mime_type=mime_type or "application/octet-stream")
    return ResourceContents(uri, text=json_text(value), mime_type=mime_type or "application/json")
