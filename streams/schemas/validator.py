"""Checks of values against JSON Schemas in bounded time, in the server or in a worker process.

jsonschema-rs does the checks. It compares items by hash, and matches patterns in linear time with
Rust's `regex`. But it holds the GIL, and a schema that refers to itself can take exponential time
for a hundred bytes. So `Validator.work` estimates the work of a check. A short check is done at
once. Any other is done by a worker (`streams.schemas.workers`), which the kernel ends after
`CPU_S`.

A worker runs this file by its path. It imports nothing of `streams`, so that it starts fast.
"""

import os
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from typing import Any, Final

import jsonschema_rs
import msgspec

Schema = dict[str, Any]

# The longest sentence about a mismatch. It quotes the peer, which may send megabytes.
SENTENCE_MAX: Final = 400

# CPU seconds of one check in a worker. 4 MiB against a schema of a hundred words takes a tenth.
CPU_S: Final = 2.0
# CPU seconds to find the mismatch in a value that does not fit. That takes longer than the check,
# since the errors of each branch of an `anyOf` are collected.
EXPLAIN_CPU_S: Final = 0.5
# Memory of a worker. 4 MiB of empty lists take 300 MiB.
WORKER_BYTES_MAX: Final = 1024 * 1024 * 1024
# Workers run at a lower priority than the server.
WORKER_NICE: Final = 10

# The header of a request to a worker: the lengths of the schema, the value, and the value's name.
REQUEST: Final = struct.Struct("!III")
# Verdicts of a worker. After `UNFIT` follow the length of the sentence and the sentence, if the
# mismatch is found in time.
FIT: Final = b"+"
UNFIT: Final = b"-"
LENGTH: Final = struct.Struct("!I")

# The work of a pattern in words of a schema: the states that its automaton may have for each byte.
_PATTERN_WORDS: Final = 20
_COUNTED_WORDS: Final = 500  # of a pattern with a count such as {1,64}, which repeats states
# These keywords check again what the keywords beside them have checked.
_UNEVALUATED: Final = ("unevaluatedProperties", "unevaluatedItems")
_DYNAMIC: Final = ("$dynamicRef", "$recursiveRef")
# In a schema that refers to itself, these keywords, or a `$ref` with others beside it, may check
# one value twice at each level. That takes exponential time in the depth.
_MULTIPLYING: Final = frozenset(
    {"allOf", "anyOf", "oneOf", "not", "if", "contains", "patternProperties", "propertyNames"}
    | {"dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef", *_UNEVALUATED}
)
_ANNOTATING: Final = frozenset({"$ref", "title", "description", "default", "examples", "$comment"})
# jsonschema-rs raises these for values that are nested too deeply.
_UNREADABLE: Final = (RecursionError, OverflowError, ValueError)
# The values of these keywords are data, not schemas.
_DATA: Final = ("const", "enum", "default", "examples")

_UNUSABLE_PATTERN: Final = (
    'is not a "regex": patterns are matched in linear time, without look-around, without '
    "backreferences, and with small repeat counts; write another one"
)


class Validator:
    """Checks values against one schema."""

    def __init__(self, schema: Schema) -> None:
        """Raises `ValueError` with the error in the schema, which begins with the place."""
        try:
            self._validator = jsonschema_rs.validator_for(
                schema,
                validate_formats=False,
                pattern_options=jsonschema_rs.RegexOptions(),
                offline=True,
            )
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
            raise ValueError(_explain_schema(error, schema)) from None
        self._words = _words(schema)

    def work(self, value_bytes: int) -> float:
        """The most work of the check of a value of this size, in units of 15 ns.

        Infinite if the time may be exponential.
        """
        return self._words * (value_bytes + 1)

    def fits(self, value: Any) -> bool:
        """Whether the value fits. A value that is nested too deeply does not."""
        try:
            return self._validator.is_valid(value)
        except _UNREADABLE:
            return False

    def mismatch(self, value: Any, whole: str) -> str | None:
        """The mismatch as a sentence of at most `SENTENCE_MAX` characters; None if the value fits.

        The sentence begins with the place. `whole` is the name of the value. Takes longer than
        `fits`.
        """
        try:
            self._validator.validate(value)
        except jsonschema_rs.ValidationError as error:
            return _explain(_deepest(error), whole)
        except _UNREADABLE:
            return f"{whole}: nested too deeply or a number too large"
        return None


def _deepest(error: jsonschema_rs.ValidationError) -> jsonschema_rs.ValidationError:
    """The mismatch in the alternative that fits furthest down, where all alternatives fail.

    That is probably the alternative that was meant.
    """
    while branches := getattr(error.kind, "context", None):
        nested = [max(branch, key=_depth) for branch in branches if branch]
        furthest = max(nested, key=_depth, default=error)
        if _depth(furthest) <= _depth(error):
            break
        error = furthest
    return error


def _depth(error: jsonschema_rs.ValidationError) -> int:
    return len(error.instance_path)


def _explain(error: jsonschema_rs.ValidationError, whole: str) -> str:
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.instance_path]
    path = "".join(steps).lstrip(".")
    if error.kind.name == "required":
        missing = error.kind.as_dict()["property"]
        return shortened(f"{path}.{missing}: missing".lstrip("."))
    return shortened(f"{path or whole}: {error.message}")


def _explain_schema(error: Exception, schema: Schema) -> str:
    if not isinstance(error, jsonschema_rs.ValidationError):
        return shortened(f"a $ref leads nowhere in this schema: {error}")
    if error.kind.name == "$ref":
        if error.message.startswith("Unknown meta-schema"):
            return shortened(f"unknown $schema {schema.get('$schema')}")
        return shortened(f"a $ref leads nowhere in this schema: {error.message}")
    told = _explain(error, "#")
    return told.replace('is not a "regex"', _UNUSABLE_PATTERN)


def shortened(sentence: str) -> str:
    """The sentence, cut to `SENTENCE_MAX` characters."""
    return sentence if len(sentence) <= SENTENCE_MAX else sentence[: SENTENCE_MAX - 1] + "…"


# -- the work of a schema


def _words(schema: Schema) -> float:
    """The most words of the schema that one value is checked against, through each `$ref`.

    Raises `ValueError` for a `$ref` without a target.
    """
    return _Counting(schema).words(schema)


class _Counting:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._behind: dict[str, float] = {}  # words of each `$ref`; 0 while they are counted
        self._is_recursive: set[str] = set()

    def words(self, node: Any) -> float:
        if isinstance(node, list):
            return 1 + sum(map(self.words, node))
        if not isinstance(node, dict):
            return 1
        found = 1.0
        for name, inner in node.items():
            if name in _DATA:
                found += _size(inner)
            elif name == "$ref" and isinstance(inner, str):
                found += self._referred(inner)
            elif name in _DYNAMIC:
                found = float("inf")
            else:
                found += self.words(inner) + _pattern_words(name, inner)
        return found * (4 if any(name in node for name in _UNEVALUATED) else 1)

    def _referred(self, ref: str) -> float:
        if ref in self._behind:
            if not self._behind[ref]:
                self._is_recursive.add(ref)
            return self._behind[ref]
        self._behind[ref] = 0.0
        target = self._find(ref)
        found = self.words(target)
        if ref in self._is_recursive and self._multiplies(target, {ref}):
            found = float("inf")
        self._behind[ref] = found
        return found

    def _multiplies(self, node: Any, seen: set[str]) -> bool:
        if isinstance(node, list):
            return any(self._multiplies(inner, seen) for inner in node)
        if not isinstance(node, dict):
            return False
        if not _MULTIPLYING.isdisjoint(node):
            return True
        ref = node.get("$ref")
        if isinstance(ref, str):
            if not _ANNOTATING.issuperset(node):
                return True
            if ref not in seen:
                seen.add(ref)
                return self._multiplies(self._find(ref), seen)
        return any(self._multiplies(inner, seen) for inner in node.values())

    def _find(self, ref: str) -> Any:
        if ref != "#" and not ref.startswith("#/"):
            return {_DYNAMIC[0]: ref}  # an anchor or a URL, which jsonschema-rs resolves
        node: Any = self._root
        for step in ref[1:].split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            try:
                node = node[int(key)] if isinstance(node, list) else node[key]
            except (LookupError, ValueError, TypeError):
                if "$id" in str(self._root) or "%" in ref:
                    return {_DYNAMIC[0]: ref}  # it may be relative to another base
                raise ValueError(f"$ref {ref} leads nowhere in this schema") from None
        return node


def _size(data: Any) -> int:
    if isinstance(data, dict):
        return 1 + sum(map(_size, data.values()))
    return 1 + sum(map(_size, data)) if isinstance(data, list) else 1


def _pattern_words(name: str, inner: Any) -> int:
    if name == "pattern" and isinstance(inner, str):
        patterns = [inner]
    elif name == "patternProperties" and isinstance(inner, dict):
        patterns = list(inner)
    else:
        return 0
    return sum(_COUNTED_WORDS if "{" in each else _PATTERN_WORDS for each in patterns)


# -- the worker


def _work() -> None:
    """Answer requests one after another until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the server alone
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, even within a check
    os.nice(WORKER_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES_MAX, WORKER_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    known: dict[bytes, Validator] = {}
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while header := source.read(REQUEST.size):
        parts = [source.read(length) for length in REQUEST.unpack(header)]
        schema, encoded, whole = parts[0], parts[1], parts[2].decode()
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        if schema not in known:
            known[schema] = Validator(msgspec.json.decode(schema))
        for part in _verdict(known[schema], encoded, whole):
            sink.write(part)
            sink.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


def _verdict(validator: Validator, encoded: bytes, whole: str) -> Iterator[bytes]:
    try:
        value = msgspec.json.decode(encoded)
    except msgspec.DecodeError as error:
        yield UNFIT + _sentence(f"{whole}: not JSON: {error}")
        return
    except RecursionError:
        yield UNFIT + _sentence(f"{whole}: nested too deeply")
        return
    if validator.fits(value):
        yield FIT
        return
    yield UNFIT
    signal.setitimer(signal.ITIMER_PROF, EXPLAIN_CPU_S)
    yield _sentence(validator.mismatch(value, whole) or f"{whole}: does not fit the schema")


def _sentence(sentence: str) -> bytes:
    encoded = sentence.encode(errors="backslashreplace")
    return LENGTH.pack(len(encoded)) + encoded


if __name__ == "__main__":
    _work()
