"""The commands that test this software: `demo` and `torture`."""

from pathlib import Path

from streams.cli.base import app, complain
from streams.limits import Durability


@app.command
def demo(*, folder: Path | None = None, json: bool = False) -> int:
    """Cut a call's connection, kill its server, and check that nothing is lost, on real input.

    Parameters
    ----------
    folder
        The folder to read; by default the standard library of the Python that runs this.
    json
        Print the figures as JSON.
    """
    from streams.cli.selftest import demo as demonstration

    return demonstration.run(folder, as_json=json)


@app.command
def torture(
    *,
    minutes: float = 1.0,
    seed: int | None = None,
    durability: Durability = "power",
    wrap: bool = False,
    keep: Path | None = None,
    json: bool = False,
) -> int:
    """Kill servers and cut connections at random, and check that nothing is lost or comes twice.

    Each transport has a real server, and real clients that call, detach and resume. Prints, for
    each transport, the messages that the journal acknowledged, those that were delivered, lost and
    seen twice, and the time to recover. Exits with 1 unless every message came, once and in order.
    Ctrl-C ends the faults early; the calls that were begun are still followed to their ends.

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
    keep
        A new folder for journals, logs and notes. Without it they are kept only after a failure.
    json
        Print the figures as JSON.
    """
    if not 0 < minutes < float("inf"):
        return complain("--minutes: write a number above 0.")
    from streams.cli.selftest import torture as torturing

    chosen = torturing.new_seed() if seed is None else seed
    child = torturing.CHILD if wrap else ""
    settings = torturing.Settings(minutes, chosen, durability, child=child)
    try:
        return torturing.run(settings, keep=keep, as_json=json)
    except FileExistsError:
        return complain(f"--keep: {keep} is there already.")
