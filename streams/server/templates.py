"""URI templates (RFC 6570) of resources, and which values a URI has for one.

All of levels 1 to 3 of the RFC is here: `{id}`, `{+path}`, `{#part}`, `{.type}`, `{/name}`,
`{;name}`, `{?query,…}`, `{&more}`. Of level 4 there are `{path*}` and `{/path*}`, for the rest of a
path, but not `{name:3}`.

The RFC tells how to make a URI from values. To match is the reverse, by one scan from each end that
never goes back, so no URI takes long. A template that a scan cannot take apart is refused: one with
two values next to each other, or two values that may both have slashes.

- A value has at least one character. `{id}` ends at each of `/?#&,`; a value of a path, at `?` and
  `#`. A slash that is part of an id comes as `%2F`.
- `{?…}` at the end matches in any order. Each of its values may be absent, and unknown ones are
  ignored.
- Values are decoded once, after the URI was taken apart. A URI with an invalid percent-encoding, a
  space or a control character matches nothing.

A value may become part of the name of a file. So a URI matches nothing (`UnsafeValue`) if a value
has a NUL, begins like an absolute path, or has `..` among the parts between its slashes.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote

import msgspec

# RFC 9110, 4.1, asks for at least 8000 octets of a URI.
URI_LETTERS_MAX: Final = 8_192

Values = dict[str, str | list[str]]

_EXPRESSION: Final = re.compile(r"\{([+#./;?&]?)([^{}]*)\}")
_URI: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[^\s\x00-\x1f\x7f]*")
_NOT_ENCODED: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_DRIVE: Final = re.compile(r"[A-Za-z]:")
_STOPS: Final = {"": "/?#&,", "+": "?#", "#": "", ".": "./?#", "/": "/?#", ";": ";/?#"} | {
    "?": "",
    "&": "",
}
_SEPARATORS: Final = {"": ",", "+": ",", "#": ","}  # others are their own


class UnsafeValue(ValueError):
    """A URI has a value that could lead out of a folder."""


class _Variable(msgspec.Struct, frozen=True):
    name: str
    stops: str  # the characters that the value cannot have
    is_path: bool  # it may have slashes
    is_list: bool  # one value for each part between slashes

    def read(self, text: str) -> str | list[str] | None:
        """The value of this text; None for a text that it cannot have."""
        if not text or any(stop in text for stop in self.stops):
            return None
        try:
            if self.is_list:
                return [unquote(part, errors="strict") for part in text.split("/")]
            return unquote(text, errors="strict")
        except UnicodeDecodeError:
            return None


class UriTemplate:
    """One template; `names` are those of its values, `optional` those that a URI may lack."""

    def __init__(self, text: str) -> None:
        """Raises `ValueError` for a template that cannot be matched."""
        check_uri(_EXPRESSION.sub("x", text), text)
        self.text = text
        atoms, query = _parsed(text)
        variables = [atom for atom in (*atoms, *query) if isinstance(atom, _Variable)]
        self.names = frozenset(variable.name for variable in variables)
        self.optional = frozenset(variable.name for variable in query)
        if len(self.names) < len(variables):
            raise ValueError(f"URI template {text!r}: each name can be in it once")
        for one, other in itertools.pairwise(atoms):
            if isinstance(one, _Variable) and isinstance(other, _Variable):
                names = f"{one.name} and {other.name}"
                raise ValueError(f"URI template {text!r}: put something between {names}")  # noqa: TRY004
        paths = [atom for atom in atoms if isinstance(atom, _Variable) and atom.is_path]
        if len(paths) > 1:
            names = ", ".join(path.name for path in paths)
            raise ValueError(f"URI template {text!r}: only one of {names} can have slashes")
        self._path = paths[0] if paths else None
        at = atoms.index(paths[0]) if paths else 0
        self._head = atoms[:at]
        self._tail = atoms[at + 1 :] if paths else atoms

    def match(self, uri: str) -> Values | None:
        """The values of a URI; None for a URI that does not match. Raises `UnsafeValue`."""
        if len(uri) > URI_LETTERS_MAX or _NOT_ENCODED.search(uri) or not _URI.fullmatch(uri):
            return None
        query = ""
        if self.optional:
            uri, _, query = uri.partition("#")[0].partition("?")
        found = self._scan(uri)
        if found is None or not self._add_query(query, found):
            return None
        for name, value in found.items():
            for part in (value, "/".join(value)) if isinstance(value, list) else (value,):
                _check_safe(name, part)
        return found

    def _scan(self, uri: str) -> Values | None:
        """The values in a URI without its query. Text stands between any two variables."""
        found: Values = {}
        start, end = 0, len(uri)
        for atom, following in itertools.pairwise((*self._head, "")):
            if isinstance(atom, str):
                if not uri.startswith(atom, start):
                    return None
                start += len(atom)
            else:
                stop = uri.find(str(following), start + 1)
                if stop < 0 or (value := atom.read(uri[start:stop])) is None:
                    return None
                found[atom.name], start = value, stop
        for atom, preceding in itertools.pairwise((*reversed(self._tail), "")):
            if isinstance(atom, str):
                if not uri.endswith(atom, start, end):
                    return None
                end -= len(atom)
            else:
                begin = uri.rfind(str(preceding), start, end - 1) if preceding else start
                begin += len(str(preceding))
                if begin < start + len(str(preceding)) or (
                    (value := atom.read(uri[begin:end])) is None
                ):
                    return None
                found[atom.name], end = value, begin
        if self._path is None:
            return found if start == end else None
        rest = self._path.read(uri[start:end])
        return None if rest is None else found | {self._path.name: rest}

    def _add_query(self, query: str, found: Values) -> bool:
        for pair in filter(None, query.split("&")):
            name, _, text = pair.partition("=")
            try:
                name, value = unquote(name, errors="strict"), unquote(text, errors="strict")
            except UnicodeDecodeError:
                return False
            if name in self.optional:
                found.setdefault(name, value)
        return True


def is_template(uri: str) -> bool:
    """Whether this is a template, and not the URI of one resource."""
    return "{" in uri or "}" in uri


def check_uri(uri: str, shown: str | None = None) -> None:
    """Raise `ValueError` for what is no URI, or too long a one."""
    if not _URI.fullmatch(uri) or is_template(uri):
        raise ValueError(f"URI {shown or uri!r}: expected something like reports://{{id}}")
    if len(uri) > URI_LETTERS_MAX:
        raise ValueError(f"a URI has at most {URI_LETTERS_MAX} characters, not {len(uri)}")


def _parsed(template: str) -> tuple[list[str | _Variable], Sequence[_Variable]]:
    """The texts and variables of a template, and the variables of the query at its end."""
    parts = list(_parts(template))
    query: list[_Variable] = []
    while parts and isinstance(last := parts[-1], list):
        parts.pop()
        query = last + query
    atoms = [part for part in parts if not isinstance(part, list)]
    if len(atoms) < len(parts):
        raise ValueError(f"URI template {template!r}: {{?…}} and {{&…}} must come last")
    return atoms, query


def _parts(template: str) -> Iterator[str | _Variable | list[_Variable]]:
    """Text, variables, and the variables of queries."""
    at = 0
    for expression in _EXPRESSION.finditer(template):
        if expression.start() > at:
            yield template[at : expression.start()]
        at = expression.end()
        operator, names = expression[1], expression[2].split(",")
        variables = [_variable(template, operator, name) for name in names]
        if operator in {"?", "&"}:
            yield variables
            continue
        for n, variable in enumerate(variables):
            lead = _SEPARATORS.get(operator, operator) if n else operator.replace("+", "")
            lead += f"{variable.name}=" if operator == ";" else ""
            if lead:
                yield lead
            yield variable
    if at < len(template):
        yield template[at:]


def _variable(template: str, operator: str, name: str) -> _Variable:
    what = f"URI template {template!r}"
    is_rest = name.endswith("*")
    name = name.removesuffix("*")
    if ":" in name:
        raise ValueError(f"{what}: {{{name}}}: a number of characters cannot be matched; drop it")
    if not name.isidentifier():
        raise ValueError(f"{what}: {name!r} cannot be the name of a parameter")
    if is_rest and operator not in {"", "+", "/"}:
        raise ValueError(f"{what}: {name}*: only {{{name}*}} and {{/{name}*}} can be matched")
    is_path = is_rest or operator in {"+", "#"}
    stops = _STOPS["+" if is_rest else operator]
    return _Variable(name, stops, is_path, is_rest)


def _check_safe(name: str, value: str | list[str]) -> None:
    for text in _texts_in(value):
        parts = text.replace("\\", "/").split("/")
        is_absolute = text.startswith(("/", "\\")) or _DRIVE.match(text)
        if "\0" in text or is_absolute or ".." in parts:
            raise UnsafeValue(f"{name}: a path that could lead out of its folder")


def _texts_in(value: str | list[str]) -> Iterator[str]:
    """The texts of a value, and those within one that may be read as JSON."""
    texts: list[Any] = [value]
    while texts:
        each = texts.pop()
        if isinstance(each, str):
            yield each
            if each[:1] in ("[", "{"):
                with suppress(ValueError, RecursionError):
                    texts.append(msgspec.json.decode(each))
        elif isinstance(each, dict):
            texts += (*each, *each.values())
        elif isinstance(each, list):
            texts += each
