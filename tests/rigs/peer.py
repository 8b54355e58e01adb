"""A child process for the tests of the transports: a server on stdio, or a relay."""

import sys

import trio

from tests.rigs.echo import LIMIT, echo
from tests.rigs.served import HELLO
from transports import stdio
from transports.relay.handover import relay


def main() -> None:
    verb, *arguments = sys.argv[1:]
    if verb == "relay":
        relay(arguments[0], HELLO)
        return
    fds = stdio.claim_standard_streams()
    print("what a tool prints is no message")
    trio.run(serve, fds)


async def serve(fds: tuple[int, int]) -> None:
    await stdio.serve(echo, fds, message_bytes_max=LIMIT)


if __name__ == "__main__":
    main()
