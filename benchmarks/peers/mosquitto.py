"""Mosquitto: a persistent session's queue, QoS 1, taken by paho-mqtt as it reconnects."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion

from benchmarks.numbered import Lost, lines_of
from benchmarks.peers import READ_TIMEOUT_S, Peer, Replayed
from benchmarks.peers.children import executable, free_port, running, with_clients

AT_ONCE: Final = 1_000  # unacknowledged messages; the broker's default is 20
# Mosquitto cannot sync each message. It writes its whole file once a second at most.
_SETTINGS: Final = """
listener {port} 127.0.0.1
allow_anonymous true
persistence true
persistence_location {folder}/
autosave_interval 1
max_queued_messages 0
max_inflight_messages {at_once}
"""
_LOOP_S: Final = 1.0


@contextmanager
def opened(folder: Path) -> Iterator[Peer]:
    """Start the broker."""
    program = executable("mosquitto", "Debian's mosquitto")
    port = free_port()
    settings = folder / "mosquitto.conf"
    settings.write_text(_SETTINGS.format(port=port, folder=folder, at_once=AT_ONCE))
    with running([program, "-c", str(settings)], port):
        absent = _Absent(port)
        yield Peer(
            with_clients("mosquitto", _version(program), "paho-mqtt"),
            absent.fill,
            {"paho-mqtt": absent.replay},
            slowness=20,
        )


def _version(program: str) -> str:
    done = subprocess.run([program, "-h"], capture_output=True, text=True, check=False)  # nosec B603 # found on the user's own PATH
    return done.stdout.split()[2]  # paho has no other way to report it, and fails here


class _Absent:
    """A subscriber that is away. The broker deletes messages that it took, so each replay fills
    anew.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._counts: dict[int, int] = {}

    def fill(self, count: int, size: int) -> None:
        self._counts[size] = count
        subscriber = self._client(size)
        subscribed: list[Any] = []
        subscriber.on_subscribe = lambda *_: subscribed.append(None)
        self._connect(subscriber)
        subscriber.subscribe(_topic(size), qos=1)
        _loop(subscriber, lambda: bool(subscribed))
        subscriber.disconnect()

    def replay(self, size: int) -> Replayed:
        count = self._counts[size]
        self._publish(count, size)
        messages: list[bytes] = []
        subscriber = self._client(size)

        def take(_: Client, __: Any, message: MQTTMessage) -> None:
            messages.append(message.payload)

        subscriber.on_message = take
        began_at = time.perf_counter()
        self._connect(subscriber)
        _loop(subscriber, lambda: len(messages) >= count)
        took_s = time.perf_counter() - began_at
        subscriber.disconnect()
        return Replayed(took_s, messages)

    def _publish(self, count: int, size: int) -> None:
        publisher = Client(CallbackAPIVersion.VERSION2)
        publisher.max_inflight_messages_set(AT_ONCE)
        published: list[Any] = []
        publisher.on_publish = lambda *_: published.append(None)
        self._connect(publisher)
        for line in lines_of(count, size):
            publisher.publish(_topic(size), line, qos=1)
        _loop(publisher, lambda: len(published) >= count)
        publisher.disconnect()

    def _client(self, size: int) -> Client:
        return Client(CallbackAPIVersion.VERSION2, client_id=_topic(size), clean_session=False)

    def _connect(self, client: Client) -> None:
        joined: list[Any] = []
        client.on_connect = lambda *_: joined.append(None)
        client.connect("127.0.0.1", self._port)
        _loop(client, lambda: bool(joined))


def _topic(size: int) -> str:
    return f"size-{size}"


def _loop(client: Client, is_done: Any) -> None:
    give_up_at = time.monotonic() + READ_TIMEOUT_S
    while not is_done():
        client.loop(_LOOP_S)
        if time.monotonic() > give_up_at:
            raise Lost("the broker has nothing more to say")
