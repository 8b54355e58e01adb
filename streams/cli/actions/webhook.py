"""The action of `webhook listen`: a receiver that checks what comes, and prints it."""

from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from streams import messages
from streams.cli.actions.output import as_json_text, harmless, one_line, say
from streams.cli.base import DONE, complain
from streams.errors import first_of
from streams.exchange import Headers, Request, Responder
from streams.process.webhooks import read_secrets
from streams.webhooks.signatures import Forged, Signer
from transports import http

LOOPBACK: Final = "127.0.0.1"
BODY_BYTES_MAX: Final = 256 * 1024
IDS_MAX: Final = 10_000  # that are remembered, to tell which webhooks come again
_TEXT: Final[Headers] = (("content-type", "text/plain; charset=utf-8"),)


class Arrival(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A webhook as it is printed."""

    status: int  # of the answer
    id: str = ""
    is_verified: bool | None = None  # None: there was no secret to check it with
    is_repeated: bool = False
    why: str = ""  # it was refused
    event: Any = None


class Receiver:
    """The endpoint. It answers the first `fail` requests with 503, and with `hangs` none."""

    def __init__(self, signer: Signer | None, *, fail: int, hangs: bool, as_json: bool) -> None:
        self._signer = signer
        self._left_to_fail = fail
        self._hangs = hangs
        self._as_json = as_json
        self._ids: dict[str, None] = {}
        self.scope = trio.CancelScope()  # it is cancelled by the end of the receiver
        self.failure: OSError | None = None  # of standard output, which ends it

    async def answer(self, request: Request, responder: Responder) -> None:
        """See `streams.exchange.Endpoint`."""
        arrival = self._received(request)
        try:
            print(as_json_text(arrival) if self._as_json else harmless(_line(arrival)), flush=True)
        except OSError as error:  # the listener would log it, and go on
            self.failure = error
            self.scope.cancel()
        if self._hangs:
            await trio.sleep_forever()
        text = f"{arrival.why}\n".encode() if arrival.why else b""
        await responder.respond(arrival.status, _TEXT, text)

    def _received(self, request: Request) -> Arrival:
        if request.method != "POST":
            return Arrival(405, why="a webhook is a POST")
        message_id = request.headers.get("webhook-id", "")
        if self._signer is not None:
            try:
                self._signer.verify(request.headers, request.body)
            except Forged as forged:
                return Arrival(401, message_id, is_verified=False, why=str(forged))
        try:
            event = messages.decode(request.body, Any)
        except ValueError as error:
            return Arrival(400, message_id, why=f"it is no JSON: {error}")
        is_repeated = message_id in self._ids
        self._ids[message_id] = None
        if len(self._ids) > IDS_MAX:
            del self._ids[next(iter(self._ids))]
        is_failing = self._left_to_fail > 0
        self._left_to_fail -= is_failing
        is_verified = None if self._signer is None else True
        return Arrival(
            503 if is_failing else 204, message_id, is_verified, is_repeated, event=event
        )


def _line(arrival: Arrival) -> str:
    if arrival.why:
        return f"{arrival.status} refused: {one_line(arrival.why)}"
    found = arrival.event if isinstance(arrival.event, dict) else {}
    data = found.get("data")
    told = data if isinstance(data, dict) else {}
    words = [
        str(arrival.status),
        "unchecked" if arrival.is_verified is None else "verified",
        *(str(each) for each in (found.get("type"), told.get("tool"), told.get("streamId"))),
        arrival.id,
        "again" if arrival.is_repeated else "",
    ]
    return one_line("  ".join(word for word in words if word))


def listen(port: int, secret_file: Path | None, *, fail: int, hangs: bool, as_json: bool) -> int:
    """Receive until Ctrl-C; returns the exit code. Raises `CannotServe`."""
    signer = None if secret_file is None else read_secrets(secret_file)
    receiver = Receiver(signer, fail=fail, hangs=hangs, as_json=as_json)
    failure: BaseException | None = None
    try:
        trio.run(_serve, receiver, port)
    except* OSError as errors:
        failure = first_of(errors)
    if failure is not None:
        return complain(f"{LOOPBACK}:{port}: cannot listen there: {failure}.")
    if receiver.failure is not None:
        raise receiver.failure
    return DONE


async def _serve(receiver: Receiver, port: int) -> None:
    with receiver.scope:
        async with trio.open_nursery() as nursery:
            serve = partial(
                http.serve,
                receiver.answer,
                LOOPBACK,
                port,
                body_bytes_max=BODY_BYTES_MAX,
                allowed_hosts=None,
            )
            found = await nursery.start(serve)
            say(f"listening at http://{LOOPBACK}:{found}/")
