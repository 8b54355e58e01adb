"""`python -m tests.fuzz TARGET --seconds N`: search for bytes that make a target fail.

With atheris (`pip install '.[fuzz]'`) coverage guides the search, without it hypothesis does. New
inputs are kept in `.fuzz/TARGET`. Inputs that fail go into the corpus, where each run of the tests
tries them again.
"""

import argparse
import hashlib
import sys
import time
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis.errors import FlakyFailure

try:
    import atheris
except ImportError:
    atheris = None

NEW = Path(".fuzz")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=60)
    arguments = parser.parse_args()
    if atheris is None:
        guess(arguments.target, arguments.seconds)
    else:
        follow(arguments.target, arguments.seconds)


def follow(name: str, seconds: int) -> None:
    """Fuzz with atheris, which ends the process."""
    with atheris.instrument_imports(include=["streams", "transports"]):
        from tests.fuzz.targets import CORPUS, TARGETS  # noqa: PLC0415
    (NEW / name).mkdir(parents=True, exist_ok=True)
    kept = CORPUS / name
    options = [f"-max_total_time={seconds}", f"-artifact_prefix={kept}/", "-max_len=8192"]
    atheris.Setup([sys.argv[0], *options, str(NEW / name), str(kept)], TARGETS[name])
    atheris.Fuzz()


def guess(name: str, seconds: int) -> None:
    """Fuzz with hypothesis."""
    from tests.fuzz.mutations import mutated  # noqa: PLC0415
    from tests.fuzz.targets import CORPUS, TARGETS  # noqa: PLC0415

    tried: list[bytes] = []

    @settings(
        max_examples=1_000,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=mutated(name))
    def run(data: bytes) -> None:
        tried[:] = [data]
        TARGETS[name](data)

    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            run()
    except (Exception, FlakyFailure):
        found = CORPUS / name / f"crash-{hashlib.sha256(tried[0]).hexdigest()[:16]}"
        found.write_bytes(tried[0])
        print(f"kept as {found}", file=sys.stderr)
        raise


if __name__ == "__main__":
    main()
