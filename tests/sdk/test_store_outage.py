"""The official clients while the store of a server is away for some seconds."""

import time
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from tests.rigs.redis_servers import running
from tests.sdk import test_http_cuts
from tests.sdk.cutting import Cut, Cutter
from tests.sdk.stock import CLIENTS, Journey, Node, StockClient
from tests.wire.process import ServerProcess, wait_until

# Longer than any of the clients tries to resume, and than the lease.
OUTAGE_S: Final = 4.0

# The installation of the clients has a bound of its own.
pytestmark = pytest.mark.timeout(200, func_only=True)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_call_that_is_cut_while_the_store_is_away_goes_on(
    client: str, node: Node, tmp_path: Path
) -> None:
    journey = Journey(tmp_path / "gates")
    journey.gates.mkdir()
    journey.open(1)
    with (
        running("redis", tmp_path / "store", "--appendonly", "yes") as store,
        ServerProcess(
            tmp_path, app=test_http_cuts.APP, store=store.url, options=("--lease=1",)
        ) as server,
        closing(Cutter(server.http_port, (Cut(1),), on_cut=lambda _: store.kill())) as cutter,
        StockClient(client, node, [journey.to(cutter.port)]) as calling,
    ):
        wait_until("the connection is cut", lambda: cutter.cuts_left == 0)
        time.sleep(OUTAGE_S)
        store.start()
        journey.open(journey.steps)
        [seen] = calling.finish()
    assert (seen["result"], seen["error"]) == (f"{journey.steps} steps", None)
    assert [log["step"] for log in seen["logs"]] == test_http_cuts.STEPS
