"""Descriptions of parameters in docstrings.

A docstring may describe the parameters in a section in the style of Google or NumPy, or in fields
of reStructuredText. `split` takes these entries out, and leaves all other text as it is written.
Libraries that parse docstrings take all sections apart, and cannot give back the rest.
"""

import re
from collections.abc import Collection, Iterator
from typing import Final

import msgspec

_HEADER: Final = re.compile(
    r"(?P<indent>\s*)(Args|Arguments|Parameters|Params|Other Parameters|Keyword Arg(ument)?s):?\s*"
)
_UNDERLINE: Final = re.compile(r"\s*(-{3,}|={3,})\s*")
# `rows: how many`, `rows (int, optional): how many`
_ENTRY: Final = re.compile(
    r"\s*(?:[-*+]\s+)?[`*]*(?P<names>\w+)`*\s*(?:\(.*?\))?\s*:(?:\s+(?P<text>.*))?"
)
# `rows : int`, `first, last`
_NUMPY_ENTRY: Final = re.compile(r"\s*(?P<names>[`*]*\w+`*(?:\s*,\s*[`*]*\w+`*)*)\s*(?::.*)?")
# `:param int rows: how many`, `@param rows: how many`
_FIELD: Final = re.compile(
    r"\s*[:@](?:(?P<type>type)|param|parameter|arg|argument|key|keyword)"
    r"\s+(?:[^:]*\s)?\**(?P<names>\w+)\s*:(?:\s+(?P<text>.*))?"
)
_ITEM: Final = re.compile(r"([-*+•]|\d+[.)])\s")


class _Entry(msgspec.Struct):
    """The description of a parameter, and the lines of the docstring that it has."""

    names: list[str]
    lines: list[int]
    text: list[str]


def split(docstring: str, known: Collection[str]) -> tuple[str, dict[str, str]]:
    """The docstring without its descriptions of `known` parameters, and these descriptions.

    `docstring` has no common indentation (`inspect.getdoc`). Entries of other names stay.
    """
    lines = docstring.splitlines()
    found: dict[str, str] = {}
    taken: set[int] = set()
    for header, entries in _sections(lines):
        read = [entry for entry in entries if set(entry.names) <= set(known)]
        for entry in read:
            taken.update(entry.lines)
            if text := _joined(entry.text):
                found |= dict.fromkeys(entry.names, text)
        if read and len(read) == len(entries):
            taken.update(header)
    if not taken:
        return docstring, {}
    rest = "\n".join(line for number, line in enumerate(lines) if number not in taken)
    return re.sub(r"\n\s*\n(\s*\n)+", "\n\n", rest).strip(), found


def _sections(lines: list[str]) -> Iterator[tuple[list[int], list[_Entry]]]:
    """The lines of the header of each section, and its entries; a field is a section."""
    number = 0
    while number < len(lines):
        start, header = number, _HEADER.fullmatch(lines[number])
        number += 1
        if header and number < len(lines) and _UNDERLINE.fullmatch(lines[number]):
            entries, number = _numpy_entries(lines, number + 1, len(header["indent"]))
            yield [start, start + 1], entries
        elif header and lines[start].rstrip().endswith(":"):
            entries, number = _google_entries(lines, number, len(header["indent"]))
            yield [start], entries
        elif field := _FIELD.fullmatch(lines[start]):
            entry = _Entry([field["names"]], [start], [field["text"] or ""])
            number = _take_indented(lines, number, _indent(lines[start]), entry)
            if field["type"]:
                entry.text = []
            yield [], [entry]


def _google_entries(lines: list[str], number: int, indent: int) -> tuple[list[_Entry], int]:
    entries: list[_Entry] = []
    base = None
    while number < len(lines):
        line = lines[number]
        if not line.strip():
            number += 1
            continue
        if _indent(line) <= indent:
            break
        base = _indent(line) if base is None else base
        entry = _ENTRY.fullmatch(line)
        if entry is None and not entries:
            break  # the section is prose
        if entry is not None and _indent(line) <= base:
            entries.append(_Entry([entry["names"]], [number], [entry["text"] or ""]))
        else:
            entries[-1].lines.append(number)
            entries[-1].text.append(line)
        number = _take_indented(lines, number + 1, base, entries[-1])
    return entries, number


def _numpy_entries(lines: list[str], number: int, indent: int) -> tuple[list[_Entry], int]:
    entries: list[_Entry] = []
    while number < len(lines):
        line = lines[number]
        if not line.strip():
            number += 1
            continue
        is_header = number + 1 < len(lines) and _UNDERLINE.fullmatch(lines[number + 1])
        entry = _NUMPY_ENTRY.fullmatch(line)
        if is_header or entry is None or _indent(line) > indent:
            break
        names = [name.strip(" `*") for name in entry["names"].split(",")]
        entries.append(_Entry(names, [number], []))
        number = _take_indented(lines, number + 1, indent, entries[-1])
    return entries, number


def _take_indented(lines: list[str], number: int, indent: int, entry: _Entry) -> int:
    """Give an entry the lines that follow and have more than this indent. Returns the next line."""
    while number < len(lines) and (not lines[number].strip() or _indent(lines[number]) > indent):
        entry.lines.append(number)
        entry.text.append(lines[number])
        number += 1
    while entry.lines and not lines[entry.lines[-1]].strip():  # blank lines stay
        entry.lines.pop()
    return number


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _joined(text: list[str]) -> str:
    """One line for each paragraph and each item of a list."""
    joined = ""
    for line in map(str.strip, text):
        if not line:
            joined = joined.rstrip("\n") + "\n\n"
        elif joined and not joined.endswith("\n"):
            joined += ("\n" if _ITEM.match(line) else " ") + line
        else:
            joined += line
    return joined.strip()
