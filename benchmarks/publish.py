"""Publishes the results of a run: benchmarks/figures.md, its pictures, and the one in README.md.

All of them are made from `benchmarks/published.json` alone. A test compares them, so that no figure
can be edited by hand.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from benchmarks import report
from benchmarks.harness import Results
from benchmarks.servers import ROOT

PUBLISHED: Final = ROOT / "benchmarks" / "published.json"
PAGE, README = ROOT / "benchmarks" / "figures.md", ROOT / "README.md"
PICTURES: Final = Path("docs", "inside")
HEADLINE: Final = "performance.svg"  # the picture in README.md

_HEAD: Final = """# Figures

Made by `python -m benchmarks --publish`. [Performance](../docs/inside/performance.md)
explains how they are measured and what each row means.
"""
_BEGIN: Final = "<!-- Made by `python -m benchmarks --publish`. -->"
_END: Final = "<!-- Made up to here. -->"


def publish(latest: Path) -> list[Path]:
    """Publish the results of a run; returns the files that were written."""
    results = load(latest)
    PUBLISHED.write_bytes(latest.read_bytes())
    written = [PUBLISHED]
    for path, text in made(results).items():
        path.write_text(text)
        written.append(path)
    return written


def load(path: Path) -> Results:
    """The results of a run."""
    return msgspec.json.decode(path.read_bytes(), type=Results)


def made(results: Results) -> Mapping[Path, str]:
    """The whole text of every file that is made from the results."""
    pictures = report.charts(results)
    places = {name: PICTURES / f"performance-{name}.svg" for name in pictures}
    files = {ROOT / places[name]: picture for name, picture in pictures.items()}
    headline = PICTURES / HEADLINE
    files[ROOT / headline] = report.headline(results)
    linked = {name: f"../{place.as_posix()}" for name, place in places.items()}
    files[PAGE] = f"{_HEAD}\n{report.markdown(results, linked)}\n"
    files[README] = _filled(README, f"![Coming back, in messages a second]({headline.as_posix()})")
    return files


def _filled(page: Path, block: str) -> str:
    before, _, rest = page.read_text().partition(_BEGIN)
    _, found, after = rest.partition(_END)
    if not found:
        raise ValueError(f"{page} has no place for results")
    return f"{before}{_BEGIN}\n{block}\n{_END}{after}"
