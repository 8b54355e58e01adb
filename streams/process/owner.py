"""The owner that a relay starts: `python -m streams.process.owner JOURNAL`.

Its options come as JSON over standard input: they may have secrets, and every user can see a
command line.
"""

import os
import sys
from contextlib import suppress

from streams.process.garbage import limit_garbage
from streams.process.options import CannotServe, Options


def main() -> int:
    """Own the journal, and serve until the server has been idle for a while."""
    limit_garbage()
    # Imported here (PLC0415): see `limit_garbage`.
    from streams.process import log, serve  # noqa: PLC0415

    options = Options.parse(sys.stdin.read())
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    log.log_as(options)
    try:
        serve.run(options)
    except CannotServe as error:
        serve.tell_starter(str(error))
        with suppress(OSError):  # the log may be on a full disk
            print(error, file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    code = main()
    from streams.process.deadline import leave

    leave(code)
