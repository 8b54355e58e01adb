"""Floods of small messages: useless ones end with 1008, and the others hold up no other client."""

import time

import pytest

from tests.wire.attacks import ATTACKS, CONNECTIONS, DEADLINE_S, Attacker
from tests.wire.process import ServerProcess

CLOSED = [name for name, attack in ATTACKS.items() if attack.code is not None]
BORNE = [name for name, attack in ATTACKS.items() if attack.code is None]


@pytest.mark.parametrize("name", CLOSED)
def test_a_flood_that_brings_nothing_is_closed(server: ServerProcess, name: str) -> None:
    attackers = [Attacker(ATTACKS[name], server.port) for _ in range(CONNECTIONS)]
    give_up_at = time.monotonic() + DEADLINE_S
    try:
        for attacker in attackers:
            while attacker.go_on(1.0):
                assert time.monotonic() < give_up_at, "the server bears it"
            assert attacker.close_code in (ATTACKS[name].code, None)  # a reset may overtake it
        assert any(attacker.close_code == ATTACKS[name].code for attacker in attackers)
    finally:
        for attacker in attackers:
            attacker.close()
    with server.connect("ws-mcp") as peer:
        peer.initialize({})


@pytest.mark.parametrize("name", BORNE)
def test_another_client_is_answered_while_a_flood_goes_on(server: ServerProcess, name: str) -> None:
    port = server.port if ATTACKS[name].is_websocket else server.http_port
    attackers = [Attacker(ATTACKS[name], port) for _ in range(CONNECTIONS)]
    try:
        with server.connect("ws-mcp") as peer:
            peer.initialize({})
            for _ in range(20):
                for index, attacker in enumerate(attackers):
                    for _ in range(50):
                        if not attacker.go_on():
                            attacker.close()
                            attackers[index] = Attacker(ATTACKS[name], port)
                            break
                assert peer.ask("ping").result == {}
    finally:
        for attacker in attackers:
            attacker.close()
