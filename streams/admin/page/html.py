"""HTML as Python calls: `tag("td", text, class_="seq")`.

Text is escaped unless it is `Markup`, which only `tag` and `join` make. So no text of a peer is
ever markup, whatever a page does with it. Control characters and marks that change the direction
of text are shown as `\\uXXXX`.
"""

import html
from collections.abc import Iterable
from typing import Final

from streams.logs import escaped

_VOID: Final = frozenset({"br", "hr", "input", "link", "meta"})


class Markup(str):
    """HTML that is escaped already."""

    __slots__ = ()


Child = str | int | float | None
Attribute = str | int | float | bool | None


def text(shown: object) -> Markup:
    """Text, escaped."""
    return Markup(html.escape(escaped(str(shown))))


def join(children: Iterable[Child], between: str = "") -> Markup:
    """Children beside each other. None is left out."""
    return Markup(between.join(_shown(each) for each in children if each is not None))


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """An element. An attribute's `_` is a `-`, but for one at its end: `class_`.

    None and False leave an attribute out, True gives it no value.
    """
    head = f"<{name}{''.join(_attribute(*each) for each in attributes.items())}>"
    return Markup(head if name in _VOID else f"{head}{join(children)}</{name}>")


def _shown(child: Child) -> str:
    return child if isinstance(child, Markup) else text(child)


def _attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    spelled = name.rstrip("_").replace("_", "-")
    return f" {spelled}" if value is True else f' {spelled}="{text(value)}"'
