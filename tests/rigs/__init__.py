"""What tests have in common: servers, clients, journals and faults to start them with."""

from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
