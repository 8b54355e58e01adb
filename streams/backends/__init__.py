"""What answers MCP behind the engine in place of a `Server`: each module has one kind of backend."""

from streams.server.backend import Backend as Backend
from streams.server.backend import Guest as Guest
from streams.server.backend import Outlet as Outlet
