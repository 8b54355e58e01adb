"""The check of sentences finds the worst ones, and the whole tree has none of them."""

import pytest

from tests.rigs import ROOT
from tests.words import in_prose, in_python, worst

WORST = [
    "Who asks first is served.",
    "It is served. Nobody waits for that.",
    "Whatever comes is kept",
    "a name for who reads it",
    "an id that is none",
    "the call is gone on with",
    "the next page, where there is none",
]


@pytest.mark.parametrize("sentence", WORST)
def test_the_worst_sentences_are_found_wherever_they_stand(sentence: str) -> None:
    for text in (f'"""{sentence}"""\n', f"x = 1  # {sentence}\n", f'x = "{sentence}"\n'):
        assert {line for _, line, _ in in_python("a.py", text)} == {1}
    assert {line for _, line, _ in in_prose("a.md", f"A title\n\n{sentence}\n")} == {3}


@pytest.mark.parametrize("sentence", ["Who asks?", "The caller is served.", "It is nonetheless so"])
def test_other_sentences_are_not(sentence: str) -> None:
    assert not list(in_python("a.py", f'"""{sentence}"""\n'))
    assert not list(in_prose("a.md", f"{sentence}\n"))


def test_code_in_the_documentation_is_not_read() -> None:
    assert not list(in_prose("a.md", "```text\nNobody is there\n```\n"))


def test_the_whole_tree_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert list(worst()) == []
