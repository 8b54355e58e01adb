"""Live through many seeds, or through one and say what happens.

    python -m tests.simulation --seeds 2000 --seconds 500 --jobs 2
    python -m tests.simulation --seed 17 --trace
    python -m tests.simulation --replicas --seeds 500
    python -m tests.simulation --crowd --seeds 2000
    python -m tests.simulation --hosts --seeds 2000

Exit code 1 where anything happened that must not.
"""

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.simulation.crowd import simulate_crowd
from tests.simulation.hosts import simulate_hosts
from tests.simulation.planted import FORGETFUL_PLANTS, HOST_PLANTS, PLANTS, SHARED_PLANTS, planted
from tests.simulation.universe import Report, simulate

AT_ONCE = 20  # seeds for one process, before another may have the next


def main() -> int:
    options = _options()
    began_at = time.monotonic()
    seeds = itertools.count(options.first)
    if options.seed is not None:
        reports: Iterable[Report] = [_live(options, options.seed)]
    else:
        reports = _many(seeds, options)
    virtual_s, lived, failed = 0.0, 0, 0
    counts: Counter[str] = Counter()
    for report in reports:
        lived += 1
        virtual_s += report.virtual_s
        counts.update(report.counts)
        if report.violations:
            failed += 1
            _tell(report, options)
    print(
        f"{lived} seeds, {virtual_s:,.0f} virtual seconds in {time.monotonic() - began_at:.0f} s: "
        + ", ".join(f"{counts[what]:,} {what}" for what in sorted(counts))
        + f"; {failed} seeds with violations"
    )
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="go on until a seed had so many on average"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--replicas", action="store_true", help="several, on a shared journal")
    parser.add_argument("--crowd", action="store_true", help="do the clients end a server?")
    parser.add_argument("--hosts", action="store_true", help="does each call get one answer?")
    parser.add_argument("--trace", action="store_true", help="say all that happens")
    parser.add_argument(
        "--plant",
        choices=sorted(PLANTS | SHARED_PLANTS | FORGETFUL_PLANTS | HOST_PLANTS),
        help="with this mistake planted",
    )
    return parser.parse_args()


def _many(seeds: Iterator[int], options: argparse.Namespace) -> Iterator[Report]:
    lived, virtual_s = 0, 0.0
    live = partial(_live, options)
    with ProcessPoolExecutor(options.jobs) as pool:
        while lived < options.seeds or virtual_s < options.seconds * options.seeds:
            share = list(itertools.islice(seeds, min(options.seeds, AT_ONCE * options.jobs)))
            for report in pool.map(live, share):
                lived += 1
                virtual_s += report.virtual_s
                yield report


def _live(options: argparse.Namespace, seed: int) -> Report:
    if options.hosts:
        with planted(options.plant):
            return simulate_hosts(seed, is_traced=options.trace)
    if options.crowd:
        return simulate_crowd(seed, is_shared=options.replicas)
    with planted(options.plant):
        return simulate(seed, is_shared=options.replicas, is_traced=options.trace)


def _tell(report: Report, options: argparse.Namespace) -> None:
    again = f"python -m tests.simulation --seed {report.seed} --trace"
    more = " --replicas" * options.replicas + " --crowd" * options.crowd
    more += " --hosts" * options.hosts
    more += f" --plant {options.plant}" if options.plant else ""
    print(f"seed {report.seed}: {report.violations[0]}")
    print(f"    {again}{more}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
