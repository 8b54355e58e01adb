"""The server file of the client's acceptance tests; clients may resume at once."""

from streams import Server
from streams.limits import Limits
from tests.wire import tools_server

server = Server("client-tests", resume_min_s=0)
for function in (tools_server.count, tools_server.steps, tools_server.ask, tools_server.fail):
    server.tool(function)
server.tool(resume_max_s=0.1)(tools_server.brief)

narrow = Server("narrow", resume_min_s=0, limits=Limits(streams_per_principal_max=2))
narrow.tool(tools_server.count)
