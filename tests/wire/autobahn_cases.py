"""Cases of the Autobahn WebSocket test suite, by its numbers: the frames to send, and the answers
that must come.

Autobahn's cases are for servers that echo. Ours speaks JSON-RPC, so each case sends a `ping` whose
id holds the text. The id comes back in the answer, in a message of the case's own length where that
matters. Both subprotocols take text and binary frames alike, and answer in the kind that is theirs.
Where Autobahn would not call the answer strict, `note` gives the reason. Long messages are shorter
here: the limits are tested elsewhere (`tests/unit/transports/test_websocket_frames.py`).
"""

import json
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Literal, NamedTuple

MASK: Final = b"\x37\xfa\x21\x3d"
CONTINUED, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10


class Frame(NamedTuple):
    """A frame, valid or not."""

    opcode: int
    payload: bytes = b""
    is_last: bool = True
    reserved: int = 0

    def encode(self, *, is_masked: bool) -> bytes:
        first = self.is_last << 7 | self.reserved << 4 | self.opcode
        mask_bit, size = is_masked << 7, len(self.payload)
        if size < 126:
            head = struct.pack("!BB", first, mask_bit | size)
        elif size < 1 << 16:
            head = struct.pack("!BBH", first, mask_bit | 126, size)
        else:
            head = struct.pack("!BBQ", first, mask_bit | 127, size)
        if not is_masked:
            return head + self.payload
        key = MASK * (size // 4 + 1)
        masked = int.from_bytes(self.payload, "big") ^ int.from_bytes(key[:size], "big")
        return head + MASK + masked.to_bytes(size, "big")


class Message(NamedTuple):
    """The answer to a ping with this id: the whole message was received."""

    id: str


class Unreadable(NamedTuple):
    """The error -32700: a whole message was received that is not JSON."""


class Pong(NamedTuple):
    payload: bytes


class Close(NamedTuple):
    """The connection is failed, or closed, with this code; 1005 stands for no code."""

    code: int


Answer = Message | Unreadable | Pong | Close
Chop = Literal["whole", "frames", "octets"]


class Case(NamedTuple):
    """`answers` must come in this order; `others` may come among them."""

    number: str
    sent: Sequence[Frame]
    answers: Sequence[Answer] = ()
    chop: Chop = "whole"
    others: Sequence[Answer] = ()
    note: str = ""


def asking(text: str) -> bytes:
    """A ping with the id `text`, which its answer repeats."""
    body = {"jsonrpc": "2.0", "id": text, "method": "ping"}
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def of_size(size: int) -> tuple[str, bytes]:
    """The id for a message of so many bytes, and the message."""
    text = "*" * (size - len(asking("")))
    return text, asking(text)


def holding(raw: bytes) -> bytes:
    """A ping with these raw bytes in its id."""
    return asking("|").replace(b"|", raw)


def cut(payload: bytes, *at: int, opcode: int = TEXT) -> list[Frame]:
    """One message in fragments, cut at these places."""
    edges = [0, *at, len(payload)]
    parts = [payload[a:b] for a, b in pairwise(edges)]
    return [
        Frame(opcode if n == 0 else CONTINUED, part, is_last=n == len(parts) - 1)
        for n, part in enumerate(parts)
    ]


def in_pieces(payload: bytes, size: int, opcode: int = TEXT) -> list[Frame]:
    """One message in fragments of so many bytes."""
    return cut(payload, *range(size, len(payload), size), opcode=opcode)


SMALL: Final = asking("Hello, world!")
HELLO: Final = Message("Hello, world!")
HALF: Final = len(SMALL) // 2
WRONG: Final = Close(1002)
NO_UTF8: Final = Close(1007)
BYE: Final = Frame(CLOSE, b"\x03\xe8")
EMPTY: Final = "an empty message holds no line, and is not answered"
SHORT: Final = "the answer to what came right before a violation or a Close need not come"
LAST: Final = "of several pings only the last must be answered (RFC 6455, 5.5.3)"


def framing() -> list[Case]:
    """1.*: messages of all lengths that are encoded in different ways."""
    cases = []
    for group, opcode in (("1.1", TEXT), ("1.2", BINARY)):
        cases.append(Case(f"{group}.1", [Frame(opcode)], note=EMPTY))
        for n, size in enumerate((125, 126, 127, 128, 65535, 65536), 2):
            text, message = of_size(size)
            cases.append(Case(f"{group}.{n}", [Frame(opcode, message)], [Message(text)]))
        text, message = of_size(65536)
        cases.append(Case(f"{group}.8", [Frame(opcode, message)], [Message(text)], "octets"))
    return cases


def pings() -> list[Case]:
    """2.*: pings and pongs."""
    binary = b"\x00\xff\xfe\xfd\xfc\xfb\x00\xff"
    ten = [b"payload-%d" % n for n in range(10)]
    many, pongs = [Frame(PING, each) for each in ten], [Pong(each) for each in ten]
    greeting = b"Hello, world!"
    return [
        Case("2.1", [Frame(PING)], [Pong(b"")]),
        Case("2.2", [Frame(PING, greeting)], [Pong(greeting)]),
        Case("2.3", [Frame(PING, binary)], [Pong(binary)]),
        Case("2.4", [Frame(PING, b"\xfe" * 125)], [Pong(b"\xfe" * 125)]),
        Case("2.5", [Frame(PING, b"\xfe" * 126)], [WRONG]),
        Case("2.6", [Frame(PING, b"\xfe" * 125)], [Pong(b"\xfe" * 125)], "octets"),
        Case("2.7", [Frame(PONG)]),
        Case("2.8", [Frame(PONG, greeting)]),
        Case("2.9", [Frame(PONG, greeting), Frame(PING, b"ours")], [Pong(b"ours")]),
        Case("2.10", many, pongs[-1:], "whole", pongs, LAST),
        Case("2.11", many, pongs[-1:], "octets", pongs, LAST),
    ]


def reserved() -> list[Case]:
    """3.*: reserved bits, of an extension that was not agreed on."""
    three = [Frame(TEXT, SMALL), Frame(TEXT, SMALL, reserved=2), Frame(PING)]
    odd = [Frame(TEXT, SMALL), Frame(TEXT, SMALL, reserved=3), Frame(PING)]
    four = [Frame(TEXT, SMALL), Frame(TEXT, SMALL, reserved=4), Frame(PING)]
    return [
        Case("3.1", [Frame(TEXT, SMALL, reserved=1)], [WRONG]),
        Case("3.2", three, [WRONG], "whole", [HELLO], SHORT),
        Case("3.3", odd, [WRONG], "frames", [HELLO], SHORT),
        Case("3.4", four, [WRONG], "octets", [HELLO], SHORT),
        Case("3.5", [Frame(BINARY, b"\xff" * 8, reserved=5)], [WRONG]),
        Case("3.6", [Frame(PING, b"x", reserved=6)], [WRONG]),
        Case("3.7", [Frame(CLOSE, b"\x03\xe8", reserved=7)], [WRONG]),
    ]


def opcodes() -> list[Case]:
    """4.*: opcodes that mean nothing."""
    cases = []
    for group, first in (("4.1", 3), ("4.2", 11)):
        before = [Frame(TEXT, SMALL)]
        for n, opcode in enumerate(range(first, first + 5), 1):
            payload = SMALL if n in (2, 4) else b""
            odd = [Frame(opcode, payload), Frame(PING)]
            if n < 3:
                cases.append(Case(f"{group}.{n}", odd[:1], [WRONG]))
            else:
                chop: Chop = "octets" if n == 5 else "frames" if n == 4 else "whole"
                cases.append(Case(f"{group}.{n}", [*before, *odd], [WRONG], chop, [HELLO], SHORT))
    return cases


def fragments() -> list[Case]:
    """5.*: fragmentation."""
    two = cut(SMALL, HALF)
    with_ping = [two[0], Frame(PING, b"between"), two[1]]
    lonely = Frame(CONTINUED, SMALL)
    endless = Frame(CONTINUED, SMALL, is_last=False)
    message = Frame(TEXT, SMALL)
    five = cut(SMALL, 5, 10, 20, 30)
    pinged = [*five[:2], Frame(PING, b"one"), *five[2:4], Frame(PING, b"two"), five[4]]
    answers = [Pong(b"between"), HELLO]
    both = [Pong(b"one")]
    chops: list[Chop] = ["whole", "frames", "octets"]
    return [
        Case("5.1", [Frame(PING, b"fragment1", is_last=False), lonely], [WRONG]),
        Case("5.2", [Frame(PONG, b"fragment1", is_last=False), lonely], [WRONG]),
        *(Case(f"5.{n}", two, [HELLO], chop) for n, chop in enumerate(chops, 3)),
        *(Case(f"5.{n}", with_ping, answers, chop) for n, chop in enumerate(chops, 6)),
        *(Case(f"5.{n}", [lonely, message], [WRONG], chop) for n, chop in enumerate(chops, 9)),
        *(Case(f"5.{n}", [endless, message], [WRONG], chop) for n, chop in enumerate(chops, 12)),
        Case("5.15", [*two, endless, message], [WRONG], "whole", [HELLO], SHORT),
        Case("5.16", [endless, two[0], two[1]] * 2, [WRONG]),
        Case("5.17", [lonely, two[0], two[1]] * 2, [WRONG]),
        Case("5.18", [two[0], Frame(TEXT, b"fragment2")], [WRONG]),
        Case("5.19", pinged, [Pong(b"two"), HELLO], "whole", both, LAST),
        Case("5.20", pinged, [Pong(b"two"), HELLO], "frames", both, LAST),
    ]


GREETING: Final = "Hello-µ@ßöäüàá-UTF-8!!"
COSMOS: Final = "κόσμε".encode()
BROKEN: Final = COSMOS + b"\xed\xa0\x80" + b"edited"
VALID: Final = {
    "6.5": ["hello$world", "hello¢world", "hello€world", "hello𤭢world", "κόσμε"],
    "6.7": ["\x00", "\x80", "\u0800", "\U00010000"],
    "6.9": ["\x7f", "\u07ff", "\uffff", "\U0010ffff"],
    "6.11": ["\ud7ff", "\ue000", "\ufffd", "\U0010ffff"],
    "6.22": ["\ufffe", "\uffff", "\U0001fffe", "\U0001ffff", "\U0010fffe", "\U0010ffff"],
    "6.23": ["\ufff9", "\ufffa", "\ufffb", "\ufffc", "\ufffd"],
}
INVALID: Final = {
    "6.8": ["f888808080", "fc8480808080"],
    "6.10": ["f7bfbfbf", "fbbfbfbfbf", "fdbfbfbfbfbf"],
    "6.12": ["80", "bf", "80bf", "80bf80", "80bf80bf"],
    "6.14": ["c0", "e080", "f08080", "f8808080", "fc80808080", "df", "efbf", "f7bfbf"],
    "6.16": ["fe", "ff", "fefeffff"],
    "6.17": ["c0af", "e080af", "f08080af", "f8808080af", "fc80808080af"],
    "6.18": ["c1bf", "e09fbf", "f08fbfbf", "f887bfbfbf", "fc83bfbfbfbf"],
    "6.19": ["c080", "e08080", "f0808080", "f880808080", "fc8080808080"],
    "6.20": ["eda080", "edadbf", "edae80", "edafbf", "edb080", "edbe80", "edbfbf"],
    "6.21": ["eda080edb080", "eda080edbfbf", "edadbfedb080", "edafbfedbfbf"],
}
NUL: Final = "good UTF-8, and no JSON: a parse error, and the connection goes on"


def utf8() -> list[Case]:
    """6.*: UTF-8, and what only looks like it."""
    text = asking(GREETING)
    octets = in_pieces(text, 1)
    at = text.index("ß".encode())
    hello = [Message(GREETING)]
    three = [Frame(TEXT, b"", is_last=False), Frame(CONTINUED, b"", is_last=False)]
    cosmos = holding(COSMOS)
    cases = [
        Case("6.1.1", [Frame(TEXT)], note=EMPTY),
        Case("6.1.2", [*three, Frame(CONTINUED)], note=EMPTY),
        Case("6.1.3", cut(SMALL, 0, len(SMALL)), [HELLO]),
        Case("6.2.1", [Frame(TEXT, text)], hello),
        Case("6.2.2", cut(text, at), hello),
        Case("6.2.3", octets, hello),
        Case("6.2.4", cut(cosmos, *range(1, len(cosmos))), [Message("κόσμε")]),
        Case("6.3.1", [Frame(TEXT, holding(BROKEN))], [NO_UTF8]),
        Case("6.3.2", in_pieces(holding(BROKEN), 1), [NO_UTF8]),
    ]
    whole = holding(COSMOS + b"\xf4\x90\x80\x80" + b"edited")
    bad = whole.index(b"\xf4")
    for n, places in enumerate(((bad, bad + 4), (bad + 1, bad + 2)), 1):
        parts = cut(whole, *places)
        cases.append(Case(f"6.4.{n}", parts[:2], [NO_UTF8], "frames", note="before it is whole"))
        cases.append(Case(f"6.4.{n + 2}", [Frame(TEXT, whole)], [NO_UTF8], "octets"))
    for n in range(1, len(COSMOS) + 1):
        prefix = COSMOS[:n]
        told = prefix.decode(errors="ignore")
        is_whole = told.encode() == prefix
        answer = Message(told) if is_whole else NO_UTF8
        cases.append(Case(f"6.6.{n}", [Frame(TEXT, holding(prefix))], [answer]))
    for group, texts in VALID.items():
        for n, each in enumerate(texts, 1):
            frame = Frame(TEXT, holding(each.encode()))
            readable: Answer = Unreadable() if each == "\x00" else Message(each)
            cases.append(
                Case(f"{group}.{n}", [frame], [readable], note=NUL if each == "\x00" else "")
            )
    for group, invalid in INVALID.items():
        for n, each in enumerate(invalid, 1):
            frame = Frame(TEXT, holding(bytes.fromhex(each)))
            cases.append(Case(f"{group}.{n}", [frame], [NO_UTF8]))
    cases.append(Case("6.11.5", [Frame(TEXT, holding(b"\xf4\x90\x80\x80"))], [NO_UTF8]))
    return cases


def closing() -> list[Case]:
    """7.*: the closing handshake."""

    def bye(code: int, reason: bytes = b"") -> Frame:
        return Frame(CLOSE, struct.pack("!H", code) + reason)

    over = [Close(1000)]
    message, two = Frame(TEXT, SMALL), cut(SMALL, HALF)
    text, long = of_size(256 * 1024)
    valid = (1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 3000, 3999, 4000, 4999)
    invalid = (0, 999, 1004, 1005, 1006, 1016, 1100, 2000, 2999)
    return [
        Case("7.1.1", [message, BYE], over, "whole", [HELLO], SHORT),
        Case("7.1.2", [BYE, BYE], over),
        Case("7.1.3", [BYE, Frame(PING)], over),
        Case("7.1.4", [BYE, message], over),
        Case("7.1.5", [two[0], BYE, two[1]], over),
        Case("7.1.6", [Frame(TEXT, long), BYE, Frame(PING)], over, "whole", [Message(text)], SHORT),
        Case("7.3.1", [Frame(CLOSE)], [Close(1005)]),
        Case("7.3.2", [Frame(CLOSE, b"a")], [WRONG]),
        Case("7.3.3", [BYE], over),
        Case("7.3.4", [bye(1000, b"Hello World!")], over),
        Case("7.3.5", [bye(1000, b"*" * 123)], over),
        Case("7.3.6", [bye(1000, b"*" * 124)], [WRONG]),
        Case("7.5.1", [bye(1000, BROKEN)], [NO_UTF8]),
        *(Case(f"7.7.{n}", [bye(code)], [Close(code)]) for n, code in enumerate(valid, 1)),
        *(Case(f"7.9.{n}", [bye(code)], [WRONG]) for n, code in enumerate(invalid, 1)),
        Case("7.13.1", [bye(5000)], [WRONG]),
        Case("7.13.2", [bye(65535)], [WRONG]),
    ]


def long() -> list[Case]:
    """9.* and 10.*: long messages, in long and short fragments."""
    text, message = of_size(64 * 1024)
    told = [Message(text)]
    quarter, quarter_message = of_size(256 * 1024)
    many = [Frame(TEXT, asking(str(n))) for n in range(1000)]
    return [
        Case("9.1.1", [Frame(TEXT, message)], told),
        Case("9.1.2", [Frame(TEXT, quarter_message)], [Message(quarter)]),
        Case("9.2.1", [Frame(BINARY, message)], told),
        Case("9.2.2", [Frame(BINARY, quarter_message)], [Message(quarter)]),
        Case("9.3.1", in_pieces(message, 64), told),
        Case("9.3.2", in_pieces(message, 256), told),
        Case("9.4.1", in_pieces(message, 64, BINARY), told),
        Case("9.5.1", [Frame(TEXT, message)], told, "octets"),
        Case("9.7.1", many, [Message(str(n)) for n in range(1000)], "frames"),
        Case("10.1.1", in_pieces(message, 1300), told),
    ]


CASES: Final = [
    *framing(),
    *pings(),
    *reserved(),
    *opcodes(),
    *fragments(),
    *utf8(),
    *closing(),
    *long(),
]
