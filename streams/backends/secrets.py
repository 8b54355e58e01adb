"""Secrets of a child: they are struck out of what it writes to standard error."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from streams.logs import REDACTED, redacted

_NAME: Final = re.compile(
    r"key|token|secret|passw|passphrase|passwd|credential|auth|cookie|bearer|private|"
    r"(?<!^)(?<!old)pwd|(^|[_-])(pass|pat|dsn|jwt|sid)($|[_-])",
    re.IGNORECASE,
)
# In a text, the name stands before the value. One attempt for each word: of a long line, an attempt
# for each of its letters would read all that follow.
_NAMED: Final = re.compile(
    r"(?<![\w-])(?P<name>(?>[\w-]*(?:token|secret|passw(?:or)?d|passphrase|pwd|api[_-]?key"
    r"|access[_-]?key|private[_-]?key|credentials?))[\w-]*+[\"']?\s*[=:]\s*[\"']?)"
    r"[^\s\"',;&]{4,}",
    re.IGNORECASE,
)
# The forms of secrets that are in wide use.
_FORMS: Final = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{16,}|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}"
    r"|glpat-[A-Za-z0-9_-]{16,}|xox[abprs]-[A-Za-z0-9-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|AIza[A-Za-z0-9_-]{30,})"
)
_IN_URL: Final = re.compile(r"(?P<user>(?<=://)[^/\s@:]*):(?P<secret>[^/\s@]+)(?=@)")
LETTERS_MIN: Final = 4  # a shorter value would be found in every other word


class Secrets:
    """The values of variables and arguments whose names are those of secrets."""

    def __init__(self, env: Mapping[str, str], command: Sequence[str]) -> None:
        found = {*_of_variables(env), *_of_arguments(command)}
        lines = {line.strip() for value in found for line in value.splitlines()}
        self._values = sorted((each for each in lines if len(each) >= LETTERS_MIN), key=len)[::-1]

    def struck_out(self, text: str) -> str:
        """A text without the secrets, and without what has the form of one."""
        for value in self._values:
            text = text.replace(value, REDACTED)
        text = _IN_URL.sub(rf"\g<user>:{REDACTED}", text)
        text = _FORMS.sub(REDACTED, _NAMED.sub(rf"\g<name>{REDACTED}", text))
        return redacted(None, "", text)


def _of_variables(env: Mapping[str, str]) -> Iterator[str]:
    for name, value in env.items():
        if _NAME.search(name):
            yield value
        yield from (found["secret"] for found in _IN_URL.finditer(value))


def _of_arguments(command: Sequence[str]) -> Iterator[str]:
    """The values of `--token X`, `--token=X` and `TOKEN=X`."""
    name = ""
    for argument in command:
        if name:
            yield argument
        left, separator, right = argument.partition("=")
        is_secret = _NAME.search(left) is not None
        if separator and is_secret:
            yield right
        yield from (found["secret"] for found in _IN_URL.finditer(argument))
        name = argument if argument.startswith("-") and is_secret and not separator else ""
