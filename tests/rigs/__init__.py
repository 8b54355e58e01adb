"""Test helpers: servers, clients, journals, and faults to run them with."""

from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
