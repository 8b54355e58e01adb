"""Finds the worst sentences in what people read: docstrings, comments, strings and documentation.

`python -m tests.words [PATH…]` prints each with its place, and exits with 1 where there is one.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# Subjects that name nothing, and turns of phrase that have to be read twice.
WORST: Final = (
    re.compile(r"\b(?:for|of|to|from) who\b", re.IGNORECASE),
    re.compile(r"(?:^|[.:;] )(?:Who|What|Whoever|Nobody|Somebody|Whatever)\b(?![^.\n]*\?)"),
    re.compile(r"\bis none\b"),
    re.compile(r"\bgone on with\b"),
    re.compile(r"\bthere (?:is|are) none\b", re.IGNORECASE),
)
# These hold the patterns, and examples of them.
LEFT_OUT: Final = ("tests/words.py", "tests/unit/test_words.py")

Place = tuple[str, int, str]


def in_python(path: str, text: str) -> Iterator[Place]:
    """Comments line by line, and each string as a whole."""
    comment: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            words = token.string.lstrip("#: ")
            if token.start[0] == last + 1 and comment:
                comment.append(words)
            else:
                yield from _worst(path, last - len(comment) + 1, " ".join(comment))
                comment = [words]
            last = token.start[0]
    yield from _worst(path, last - len(comment) + 1, " ".join(comment))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from _worst(path, node.lineno, node.value)


def in_prose(path: str, text: str) -> Iterator[Place]:
    """Paragraphs, without code."""
    text = re.sub(
        r"^```.*?^```", lambda found: "\n" * found[0].count("\n"), text, flags=re.M | re.S
    )
    line = 1
    for paragraph in re.split(r"(\n(?=\n|[-*|#>]|\d+\. ))", text):
        begin = line + paragraph[:1].count("\n")
        yield from _worst(path, begin, paragraph.strip().lstrip("-*|#> "))
        line += paragraph.count("\n")


def _worst(path: str, line: int, words: str) -> Iterator[Place]:
    flat = " ".join(words.split())
    for pattern in WORST:
        for found in pattern.finditer(flat):
            yield path, line, flat[max(0, found.start() - 20) : found.end() + 60]


def worst(*paths: str) -> Iterator[Place]:
    """All of them in the files under version control, or in those of `paths`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *paths], check=True, stdout=subprocess.PIPE, text=True
    )
    for path in listed.stdout.split("\0"):
        if path in LEFT_OUT or not Path(path).is_file():
            continue
        if path.endswith(".py"):
            yield from in_python(path, Path(path).read_text())
        elif path.endswith(".md"):
            yield from in_prose(path, Path(path).read_text())


if __name__ == "__main__":
    places = list(worst(*sys.argv[1:]))
    for path, line, words in places:
        print(f"{path}:{line}: {words}")
    print(f"{len(places)} sentences whose subject names nothing", file=sys.stderr)
    sys.exit(bool(places))
