"""A server with a tool for each of the signatures, named by their positions in the table."""

from streams import Server
from tests.sdk.signatures import CASES

server = Server("signatures")

for position, case in enumerate(CASES):
    if "refused" not in case.differs:
        server.tool(case.function(), name=f"tool-{position}")
