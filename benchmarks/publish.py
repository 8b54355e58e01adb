"""Puts the results of a run where they are read: docs/performance.md and README.md.

The tables stand between two markers and are generated from `benchmarks/published.json` alone; a
test compares them, so that they always agree.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from benchmarks import report
from benchmarks.harness import Results
from benchmarks.servers import ROOT

PUBLISHED: Final = ROOT / "benchmarks" / "published.json"
PAGE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
HEADLINE: Final = "performance.svg"  # the picture that stands there

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
    """The contents of all files that are generated from the results."""
    pictures = report.charts(results)
    names = {name: f"performance-{name}.svg" for name in pictures}
    files = {PAGE.with_name(names[name]): picture for name, picture in pictures.items()}
    files[PAGE] = _filled(PAGE, report.markdown(results, names))
    files[PAGE.with_name(HEADLINE)] = report.headline(results)
    files[README] = _filled(README, f"![Coming back, in messages a second](docs/{HEADLINE})")
    return files


def _filled(page: Path, block: str) -> str:
    before, _, rest = page.read_text().partition(_BEGIN)
    _, found, after = rest.partition(_END)
    if not found:
        raise ValueError(f"{page} has no place for results")
    return f"{before}{_BEGIN}\n{block}\n{_END}{after}"
