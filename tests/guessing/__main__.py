"""See `tests.guessing`."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.guessing import times, tries
from tests.guessing.guesses import Guesser, served


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.guessing")
    parser.add_argument("--tries", type=int, default=1_000_000, help="a fifth of them over HTTP")
    parser.add_argument("--timed", type=int, default=100_000, help="of each kind")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with served(Path(folder)) as (server, theirs):
            by_http = arguments.tries // 5
            for way, share in (
                (tries.over_websocket, arguments.tries - by_http),
                (tries.over_http, by_http),
            ):
                found = way(server, Guesser(theirs, 1), share)
                print(f"{way.__name__}: {found.count} tries, one answer: {found}", flush=True)
            apart = times.over_websocket(server, Guesser(theirs, 2), arguments.timed)
            apart += times.over_http(server, Guesser(theirs, 3), arguments.timed)
            journal = server.journal
        apart += times.of_lookups(journal, theirs, arguments.timed)
    for each in apart:
        print(each)
    worst = max(each.most for each in apart)
    print(f"at most {worst:.2%} apart, {times.APART_MAX:.0%} may be")
    return int(worst >= times.APART_MAX)


if __name__ == "__main__":
    sys.exit(main())
