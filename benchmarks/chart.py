"""A bar chart as SVG, legible on light and on dark ground."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final, Literal

import msgspec

WIDTH: Final = 880
LABELS_WIDTH: Final = 300
NUMBERS_WIDTH: Final = 100
ROW: Final = 22
HEAD: Final = 66

STYLE: Final = """<style>
.bg{fill:#ffffff}.t{fill:#1f2328}.s{fill:#59636e;font-size:12px}.grid{stroke:#d0d7de}
.ours{fill:#0969da}.bare{fill:#8250df}.peer{fill:#bf8700}.limit{fill:#afb8c1}
@media (prefers-color-scheme: dark){.bg{fill:#0d1117}.t{fill:#e6edf3}.s{fill:#9198a1}
.grid{stroke:#30363d}.ours{fill:#4493f8}.bare{fill:#ab7df8}.peer{fill:#d29922}.limit{fill:#656c76}}
</style>"""


class Bar(msgspec.Struct, frozen=True):
    """One bar; `kind` selects its colour. `word` stands in place of a missing value."""

    label: str
    value: float
    kind: Literal["ours", "bare", "limit", "peer"]
    word: str = ""


class _Scale:
    """Logarithmic, over the whole decades that hold all values."""

    def __init__(self, values: Sequence[float]) -> None:
        self.first = math.floor(math.log10(min(values)))
        self.last = max(math.ceil(math.log10(max(values))), self.first + 1)

    @property
    def decades(self) -> range:
        return range(self.first, self.last + 1)

    def x(self, value: float) -> float:
        """The x coordinate of a value."""
        share = (math.log10(value) - self.first) / (self.last - self.first)
        return LABELS_WIDTH + share * (WIDTH - LABELS_WIDTH - NUMBERS_WIDTH)


def bar_chart(title: str, subtitle: str, groups: Mapping[str, Sequence[Bar]]) -> str:
    """The bars of all groups, one below the other, on one logarithmic scale; values are above 0."""
    scale = _Scale([bar.value for bars in groups.values() for bar in bars if not bar.word])
    y, drawn = HEAD, []
    for name, bars in groups.items():
        drawn.append(_text(16, y + 15, name, weight="600"))
        for place, bar in enumerate(bars, 1):
            drawn.append(_bar(scale, y + place * ROW, bar))
        y += (len(bars) + 2) * ROW
    body = [_text(16, 28, title, weight="600"), _text(16, 48, subtitle, kind="s")]
    body += _grid(scale, HEAD, y - ROW)
    return "\n".join([*_frame(y + 10, title, subtitle), *body, *drawn, "</svg>", ""])


def _frame(height: float, title: str, subtitle: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'width="{WIDTH}" height="{height:g}" role="img" aria-labelledby="title desc" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" '
        'font-size="14">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="desc">{escape(subtitle)}</desc>',
        STYLE,
        f'<rect class="bg" width="{WIDTH}" height="{height:g}" rx="8"/>',
    ]


def _grid(scale: _Scale, top: float, bottom: float) -> list[str]:
    lines = []
    for decade in scale.decades:
        x = scale.x(10**decade)
        lines.append(f'<line class="grid" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}"/>')
        lines.append(_text(x, bottom + 16, short(10**decade), kind="s", anchor="middle"))
    return lines


def _bar(scale: _Scale, y: float, bar: Bar) -> str:
    start = scale.x(10**scale.first)
    label = _text(start - 8, y + 16, bar.label, kind="s", anchor="end")
    if bar.word:
        return label + _text(start + 6, y + 16, bar.word, kind="s")
    end = scale.x(bar.value)
    rectangle = (
        f'<rect class="{bar.kind}" x="{start:.1f}" y="{y + 3:g}" '
        f'width="{end - start:.1f}" height="{ROW - 6}" rx="2"/>'
    )
    return label + rectangle + _text(end + 6, y + 16, short(bar.value), kind="s")


def _text(
    x: float, y: float, words: str, *, kind: str = "t", anchor: str = "start", weight: str = "400"
) -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:g}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )


def short(value: float) -> str:
    """A positive number in three digits, as `1.23M`."""
    for unit, word in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{word}"
    return f"{value:.3g}"
