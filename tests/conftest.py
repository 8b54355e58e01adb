"""What holds for every test."""

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def log_as_by_default() -> Iterator[None]:
    """A command that ran in this process has sent the log to its own standard error."""
    yield
    structlog.reset_defaults()
