"""The frame of every page: its head, its style sheet and scripts, and the headers of its response.

A page is made of *regions*, elements with an id. While a browser shows it, the server sends it each
region that has changed, and htmx puts that in the place of the old one. Without scripts the same
page can be read, and loaded again.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Final

import msgspec

from streams.admin.page.html import Attribute, Child, Markup, join, tag
from streams.exchange import Headers

# Nothing of another origin, and nothing inline: text that is markup by mistake can do nothing.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
SAFE: Final[Headers] = (
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    # With `no-referrer` a browser would send forms without their origin.
    ("referrer-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
)
HTML: Final[Headers] = (
    ("content-type", "text/html; charset=utf-8"),
    ("cache-control", "no-store"),
    *SAFE,
)
_TIME: Final = re.compile("(<time[^>]*>)[^<]*")
_FOR_EVER: Final = ("cache-control", "public, max-age=31536000, immutable")
_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "txt": "text/plain; charset=utf-8",
}
# htmx adds no styles, no scripts and no handlers from attributes, keeps no history, and asks no
# other origin. Only the outermost elements of an update are regions.
_HTMX: Final = msgspec.json.encode(
    {
        "includeIndicatorStyles": False,
        "allowEval": False,
        "allowScriptTags": False,
        "selfRequestsOnly": True,
        "historyEnabled": False,
        "historyCacheSize": 0,
        "allowNestedOobSwaps": False,
        "attributesToSettle": [],
        "defaultSettleDelay": 0,
    }
).decode()


def _assets() -> dict[str, bytes]:
    folder = resources.files("streams.admin.page") / "static"
    return {each.name: each.read_bytes() for each in folder.iterdir()}


ASSETS: Final = _assets()
# Part of the path of each file, so that a browser never uses one of another version.
VERSION: Final = hashlib.sha256(b"".join(ASSETS[name] for name in sorted(ASSETS))).hexdigest()[:12]


class Region(msgspec.Struct, frozen=True):
    """A part of a page that may change: an element with an id.

    `parts` are elements in it with ids of their own. While they are the same ones in the same
    order, those that have changed are sent without the others.
    """

    id: str
    html: Markup
    parts: Mapping[str, Markup] = {}


def region(name: str, id_: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """The element of a region, or of a part of one."""
    return tag(name, *children, id=id_, hx_swap_oob="true", **attributes)


def trouble(told: str = "") -> Region:
    """Why a page shows what was, and not what is; empty while it shows that."""
    html = region("p", "trouble", told, class_="problem", role="alert", hidden=not told)
    return Region("trouble", html)


class Updates:
    """The regions that one browser has. It lets ages grow itself: these alone are no change."""

    def __init__(self) -> None:
        self._shown: dict[str, Region] = {}

    def lacking(self, regions: Sequence[Region]) -> Markup:
        """The regions that have changed since the last call; all of them at the first.

        Each element is in a template, where HTML allows rows without their table.
        """
        found: list[Markup] = []
        for each in regions:
            known = self._shown.get(each.id)
            self._shown[each.id] = each
            if known is not None and each.parts and list(known.parts) == list(each.parts):
                found += [
                    html for id_, html in each.parts.items() if not _is_same(known.parts[id_], html)
                ]
            elif known is None or not _is_same(known.html, each.html):
                found.append(each.html)
        return join(tag("template", each) for each in found)


def _is_same(known: Markup, html: Markup) -> bool:
    return known == html or _TIME.sub(r"\1", known) == _TIME.sub(r"\1", html)


def page(title: str, *body: Child, live: str | None = None) -> bytes:
    """A whole page. `live` is the path of its updates."""
    wanted: dict[str, Attribute] = {}
    if live is not None:
        wanted = {"hx_ext": "sse", "sse_connect": live, "sse_swap": "message", "hx_swap": "none"}
    scripts = ("htmx.min.js", "htmx-ext-sse.min.js", "page.js") if live is not None else ()
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="htmx-config", content=_HTMX) if live is not None else None,
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("link", rel="stylesheet", href=asset("page.css")),
        *(tag("script", src=asset(script), defer=True) for script in scripts),
    )
    return f"<!doctype html>{tag('html', head, tag('body', *body, **wanted), lang='en')}".encode()


def asset(name: str) -> str:
    """The path of a static file."""
    return f"/static/{VERSION}/{name}"


def asset_headers(name: str) -> Headers:
    """The headers of a response with a static file."""
    return (("content-type", _TYPES[name.rpartition(".")[2]]), _FOR_EVER, *SAFE)
