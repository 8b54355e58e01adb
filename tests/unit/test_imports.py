"""The graph of imports: no circles, few rooms and floors, and a picture that is up to date."""

import pytest

from tests.imports import PICTURE, Graph, circles, floors, modules, picture, rooms
from tests.rigs import ROOT

ROOMS_MAX = 43
FLOORS_MAX = 10


@pytest.fixture(scope="module")
def graph() -> Graph:
    return modules()


def test_no_modules_import_each_other(graph: Graph) -> None:
    """Imports that only a type checker sees count, too."""
    assert circles(graph) == []


def test_there_are_not_more_rooms_and_floors(graph: Graph) -> None:
    found = rooms(graph)
    assert len(found) <= ROOMS_MAX
    assert len(floors(found)) <= FLOORS_MAX


def test_the_picture_shows_the_graph(graph: Graph) -> None:
    """Run `make imports` after a change of the graph."""
    assert (ROOT / PICTURE).read_text() == picture(graph)


def test_a_circle_is_found_and_stands_on_one_floor() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set[str]()}
    assert circles(graph) == [["b", "c"]]
    assert floors(graph) == [["d"], ["b", "c"], ["a"]]
