"""Charts as inline SVG, without styles of their own: the style sheet has the colours.

Each chart is stretched to its place, so it has lines and areas only. Words and numbers stand beside
it as HTML, where they keep their size on a phone.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from streams.admin.page.html import Markup, tag
from streams.observe.history import Sample

WIDTH: Final = 1000.0
HEIGHT: Final = 100.0
SPARK_WIDTH: Final = 240.0
SPARK_HEIGHT: Final = 40.0
MARKS: Final = ("numbered", "durable", "handed", "delivered")  # the first is drawn at the back


class Rule(msgspec.Struct, frozen=True):
    """A moment that is drawn as a vertical line."""

    at: float
    kind: str  # a class of the style sheet
    title: str


def timeline(points: Sequence[Sample], rules: Sequence[Rule], until: float, label: str) -> Markup:
    """The four marks of a stream over time, as areas in front of each other, and its moments."""
    since = min([each.at for each in points] + [each.at for each in rules], default=until)
    span = max(until - since, 0.001)
    top = max((each.numbered for each in points), default=0) or 1

    def across(at: float) -> float:
        return min(max((at - since) / span, 0.0), 1.0) * WIDTH

    areas = []
    for mark in MARKS:
        line = [(across(each.at), HEIGHT * (1 - getattr(each, mark) / top)) for each in points]
        areas.append(tag("path", class_=f"area {mark}", d=_below(line)))
    lines = [
        tag("line", tag("title", each.title), class_=class_, x1=x, x2=x, y1=0, y2=_number(HEIGHT))
        for each in rules
        for x in (_number(across(each.at)),)
        for class_ in ("halo", f"rule {each.kind}")
    ]
    return _svg("timeline", WIDTH, HEIGHT, label, *areas, *lines)


def sparkline(values: Sequence[float], places: int, label: str) -> Markup:
    """Values at equal distances, the newest at the right edge of `places` places."""
    top = max(values, default=0.0) or 1.0
    step = SPARK_WIDTH / max(places - 1, 1)
    first = SPARK_WIDTH - step * (len(values) - 1)
    dots = [
        (first + step * number, SPARK_HEIGHT - 1 - (SPARK_HEIGHT - 2) * value / top)
        for number, value in enumerate(values)
    ]
    line = " ".join(f"{_number(x)},{_number(y)}" for x, y in dots)
    drawn = tag("polyline", class_="spark", points=line)
    return _svg("sparkline", SPARK_WIDTH, SPARK_HEIGHT, label, drawn)


def _below(line: Sequence[tuple[float, float]]) -> str:
    """The path around the area below a line."""
    if not line:
        return ""
    first, last = line[0][0], line[-1][0]
    drawn = "".join(f"L{_number(x)},{_number(y)}" for x, y in line)
    bottom = _number(HEIGHT)
    return f"M{_number(first)},{bottom}{drawn}L{_number(last)},{bottom}Z"


def _svg(class_: str, width: float, height: float, label: str, *drawn: Markup) -> Markup:
    return tag(
        "svg",
        *drawn,
        class_=class_,
        viewBox=f"0 0 {_number(width)} {_number(height)}",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
    )


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
