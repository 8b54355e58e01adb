"""The corpus of each target is tried again, with inputs near it: see `tests/fuzz`.

`FUZZ_EXAMPLES` sets the number of inputs beside the corpus; they come from a fixed seed.
"""

import os
import warnings

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.mutations import mutated
from tests.fuzz.targets import CORPUS, TARGETS, corpus_of

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "40"))


@pytest.fixture(autouse=True)
def _every_warning_is_an_error() -> None:
    warnings.simplefilter("error")


def test_every_target_has_a_corpus_and_every_corpus_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_kept_does_not_fail_again(name: str) -> None:
    kept = corpus_of(name)
    assert kept
    for data in [b"", *kept]:
        TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_nearly_like_it_does_not_fail_either(name: str) -> None:
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=mutated(name))
    def run(data: bytes) -> None:
        TARGETS[name](data)

    run()
