"""The graph of imports: rooms, floors, arrows and circles. `make imports` draws it.

A room is a package, or a module that lies beside the packages of `streams` or `transports`. Imports
that only a type checker sees count like others: a reader has to follow them as well. A floor holds
the rooms that import only from floors below. A circle is a set of modules each of which imports,
directly or not, all the others.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import grimp

ROOTS: Final = ("streams", "transports")
PICTURE: Final = Path("docs/inside/imports.svg")
_TOP: Final = frozenset(ROOTS)

Graph = Mapping[str, set[str]]  # what each imports


def modules() -> Graph:
    """The product's modules; a package stands for its `__init__`."""
    graph = grimp.build_graph(*ROOTS, exclude_type_checking_imports=False, cache_dir=None)
    return {
        module: graph.find_modules_directly_imported_by(module) for module in sorted(graph.modules)
    }


def room_of(module: str, all_modules: Iterable[str]) -> str:
    """The innermost package around the module; the module itself beside the packages."""
    package = module
    if not any(each.startswith(f"{module}.") for each in all_modules):
        package = module.rpartition(".")[0]
    return module if package in _TOP else package


def rooms(graph: Graph) -> Graph:
    """Which rooms each room imports."""
    room = {module: room_of(module, graph) for module in graph}
    found: dict[str, set[str]] = {each: set() for each in room.values()}
    for module, imported in graph.items():
        found[room[module]] |= {room[each] for each in imported} - {room[module]}
    return found


def circles(graph: Graph) -> list[list[str]]:
    """The strongly connected components of more than one node (Tarjan's algorithm)."""
    found: list[list[str]] = []
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            at = stack.index(node)
            component = sorted(stack[at:])
            del stack[at:]
            if len(component) > 1:
                found.append(component)

    for node in graph:
        if node not in order:
            visit(node)
    return found


def floors(graph: Graph) -> list[list[str]]:
    """Nodes by height, the lowest first. Those of one circle are on one floor."""
    circle_of = {each: tuple(circle) for circle in circles(graph) for each in circle}
    heights: dict[str, int] = {}

    def height(node: str) -> int:
        if node not in heights:
            together = circle_of.get(node, (node,))
            below = {other for each in together for other in graph[each]} - set(together)
            found = 1 + max(map(height, below), default=-1)
            heights.update(dict.fromkeys(together, found))
        return heights[node]

    for node in graph:
        height(node)
    return [
        sorted(node for node in graph if heights[node] == floor)
        for floor in range(max(heights.values(), default=-1) + 1)
    ]


def summary(graph: Graph) -> str:
    """One line of figures."""
    found = rooms(graph)
    arrows = sum(map(len, found.values()))
    return (
        f"{len(graph)} modules, {len(found)} rooms, {len(floors(found))} floors, "
        f"{arrows} arrows, {len(circles(graph))} circles"
    )


# The picture: sizes in pixels.
_BOX, _LINE, _GAP, _MARGIN = (150, 28), 84, 14, 20


def picture(graph: Graph) -> str:
    """The rooms on their floors, as SVG."""
    found = rooms(graph)
    levels = floors(found)
    most = max(map(len, levels))
    width = 2 * _MARGIN + most * (_BOX[0] + _GAP) - _GAP
    height = 2 * _MARGIN + len(levels) * _LINE + 20
    place: dict[str, tuple[float, float]] = {}
    for number, names in enumerate(levels):
        left = (width - len(names) * (_BOX[0] + _GAP) + _GAP) / 2
        top = height - _MARGIN - _BOX[1] - number * _LINE
        for index, name in enumerate(names):
            place[name] = (left + index * (_BOX[0] + _GAP), top)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_MARGIN}" y="{_MARGIN}">{summary(graph)}</text>',
    ]
    for name, imported in sorted(found.items()):
        for other in sorted(imported):
            (x1, y1), (x2, y2) = place[name], place[other]
            half = _BOX[0] / 2
            out.append(
                f'<line x1="{x1 + half:g}" y1="{y1 + _BOX[1]:g}" x2="{x2 + half:g}" y2="{y2:g}" '
                'stroke="#9ab" stroke-width="0.8"/>'
            )
    for name, (x, y) in place.items():
        out.append(
            f'<rect x="{x:g}" y="{y:g}" width="{_BOX[0]}" height="{_BOX[1]}" rx="4" '
            'fill="#eef3f8" stroke="#456"/>'
            f'<text x="{x + _BOX[0] / 2:g}" y="{y + 18:g}" text-anchor="middle">{name}</text>'
        )
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    found = modules()
    print(summary(found))
    for circle in circles(found):
        print("circle:", " ".join(circle))
    if "--draw" in sys.argv[1:]:
        PICTURE.write_text(picture(found))
        print(f"{PICTURE} is written")
