"""`python -m streams.owner OPTIONS`: what a relay starts, with its options as JSON."""

import sys
from contextlib import suppress

from streams import console, serving
from streams.options import CannotServe, Options


def main() -> int:
    """Own the journal until there has been nothing to do for a while."""
    options = Options.parse(sys.argv[1])
    console.log_to_stderr(as_json=options.json_log)
    try:
        serving.run(options)
    except CannotServe as error:
        serving.tell_starter(str(error))
        with suppress(OSError):  # the log may be on a full disk
            print(error, file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
