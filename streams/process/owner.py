"""The owner that a relay starts: `python -m streams.process.owner OPTIONS`, with JSON options."""

import sys
from contextlib import suppress

from streams import logs
from streams.process import serve
from streams.process.options import CannotServe, Options


def main() -> int:
    """Own the journal, and serve until the server has been idle for a while."""
    options = Options.parse(sys.argv[1])
    logs.log_to_stderr(as_json=options.json_log)
    try:
        serve.run(options)
    except CannotServe as error:
        serve.tell_starter(str(error))
        with suppress(OSError):  # the log may be on a full disk
            print(error, file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
