"""`dial` loads no server: a command that calls a tool should start at once."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("url", ["ws://localhost:1", "http://localhost:1", "stdio:server"])
def test_a_client_loads_no_server(url: str) -> None:
    code = f"import sys, transports; transports.dial({url!r}); print('\\n'.join(sys.modules))"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert "transports.net.dialing" in loaded or url.startswith("stdio:")
    servers = {"transports.net.listening", "transports.websocket.server", "transports.http.server"}
    assert servers.isdisjoint(loaded)
