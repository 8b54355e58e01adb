"""The version, for `pyproject.toml` too: a relay would wait for importlib.metadata to load."""

from typing import Final

VERSION: Final = "0.1.0"
