"""The targets by name, and the corpus of each."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.fuzz import framing, http, relay, secrets, websocket, words

Target = Callable[[bytes], None]
CORPUS: Final = Path(__file__).with_name("corpus")

TARGETS: Final[dict[str, Target]] = {
    "messages": words.parse,
    "intents": words.read,
    "shown": words.shown,
    "announcements": words.announced,
    "tickets": secrets.ticket,
    "tokens": secrets.token,
    "event_ids": secrets.event_id,
    "lines": framing.lines,
    "line_bodies": framing.line_body,
    "json_bodies": framing.json_body,
    "event_bodies": framing.event_body,
    "event_memory": framing.event_memory,
    "http_requests": http.requests,
    "http_responses": http.response,
    "http_heads": http.head,
    "refusals": http.refusal,
    "handshakes": websocket.handshake,
    "sieve": websocket.sieve,
    "text_frames": websocket.text_frames,
    "line_frames": websocket.line_frames,
    "hellos": relay.hello,
    "relay_answers": relay.answer,
}


def corpus_of(name: str) -> list[bytes]:
    """The corpus of a target, in a stable order."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
