"""`mcp-streams torture`."""

from pathlib import Path

from streams.cli.base import app, complain
from streams.limits import Durability


@app.command
def demo(*, folder: Path | None = None, json: bool = False) -> int:
    """Cut a call's connection, kill its server, and see that nothing is lost, on real input.

    Parameters
    ----------
    folder
        What to walk; by default the standard library of the Python that runs this.
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
    keep: Path | None = None,
    json: bool = False,
) -> int:
    """Kill servers and cut connections at random, and see that nothing is lost or comes twice.

    There is a real server for each transport, and real clients that call, leave and come back.
    Prints, for each, what the journal acknowledged and what was delivered, lost and seen twice, and
    how long it took to recover. Exits with 1 unless all of it came, once and in order. Ctrl-C ends
    it early; what was begun is still seen to its end.

    Parameters
    ----------
    minutes
        For how long servers are killed.
    seed
        Throws the same dice again; when what happens is still the machine's choice.
    durability
        As for serve.
    keep
        A folder to be made, for journals, logs and notes. Without it they stay only where something
        went wrong.
    json
        Print the figures as JSON.
    """
    if not 0 < minutes < float("inf"):
        return complain("--minutes: write a number above 0.")
    from streams.cli.selftest import torture as torturing

    chosen = torturing.new_seed() if seed is None else seed
    settings = torturing.Settings(minutes, chosen, durability)
    try:
        return torturing.run(settings, keep=keep, as_json=json)
    except FileExistsError:
        return complain(f"--keep: {keep} is there already.")
