"""Descriptions of parameters, from docstrings and annotations."""

import inspect
from typing import Annotated, Any

import docstring_parser
import pytest
import typing_extensions
from annotated_types import doc
from msgspec import Meta
from pydantic import Field

from streams.schemas.docstrings import split
from streams.server.call import Call
from streams.server.tools import make_tool
from tests.rigs.toolkit import taking

GOOGLE = """Build the report.

    It has totals.

    Args:
        rows: How many rows,
            without the header.
        title (str, optional): The title. Defaults to "yearly".
        *tags: Any of:

            - draft
            - final
        call: The running call.

    Returns:
        The report: all of it.

    Raises:
        ValueError: without rows
    """

NUMPY = """Build the report.

    It has totals.

    Parameters
    ----------
    rows : int
        How many rows,
        without the header.
    title : str, optional
        The title. Defaults to "yearly".
    *tags
        Any of:

        - draft
        - final
    call
        The running call.

    Returns
    -------
    str
        The report: all of it.

    Raises
    ------
    ValueError
        without rows
    """

REST = """Build the report.

    It has totals.

    :param int rows: How many rows,
        without the header.
    :type rows: int
    :param title: The title. Defaults to "yearly".
    :param tags: Any of:

        - draft
        - final
    :param call: The running call.
    :returns: The report: all of it.
    :raises ValueError: without rows
    """

NAMES = ("rows", "title", "tags", "call")
FOUND = {
    "rows": "How many rows, without the header.",
    "title": 'The title. Defaults to "yearly".',
    "tags": "Any of:\n\n- draft\n- final",
    "call": "The running call.",
}


class TestDocstrings:
    @pytest.mark.parametrize("docstring", [GOOGLE, NUMPY, REST])
    def test_each_style_is_read(self, docstring: str) -> None:
        rest, found = split(inspect.cleandoc(docstring), NAMES)
        assert found == FOUND
        assert rest.startswith("Build the report.\n\nIt has totals.\n\n")
        assert "The report: all of it." in rest
        assert "without rows" in rest
        assert "How many" not in rest
        assert "Args" not in rest
        assert "Parameters" not in rest
        assert ":type" not in rest

    @pytest.mark.parametrize("docstring", [GOOGLE, NUMPY, REST])
    def test_a_library_reads_the_same(self, docstring: str) -> None:
        parsed = docstring_parser.parse(docstring)
        read = {
            each.arg_name.lstrip("*"): " ".join((each.description or "").split())
            for each in parsed.params
        }
        assert read == {name: " ".join(text.split()) for name, text in FOUND.items()}

    @pytest.mark.parametrize(
        ("docstring", "rest", "found"),
        [
            ("Build.", "Build.", {}),
            ("", "", {}),
            ("Args:\n  rows: a", "", {"rows": "a"}),
            (
                "Build.\n\nArguments:\n    rows: a\n    title: b",
                "Build.",
                {"rows": "a", "title": "b"},
            ),
            ("Build.\n\nParams:\n\trows: a", "Build.", {"rows": "a"}),
            ("Build.\n\nKeyword Args:\n    rows: a", "Build.", {"rows": "a"}),
            ("Build.\nArgs:\n    rows: a\nMore.", "Build.\nMore.", {"rows": "a"}),
            ("Build.\n\nArgs:\n    rows: a\n    b\n", "Build.", {"rows": "a b"}),
            ("Build.\n\nArgs:\n    rows:\n        a: b", "Build.", {"rows": "a: b"}),
            ("Build.\n\nArgs:\n    - rows: a", "Build.", {"rows": "a"}),
            ("Build.\n\nArgs:\n    `rows`: a", "Build.", {"rows": "a"}),
            ("Build.\n\nArgs:\n    rows (dict[str, (int)]): a", "Build.", {"rows": "a"}),
            ("Build.\n\nArgs:\n    rows:", "Build.", {}),
            # Text that is no entry of a parameter stays.
            ("Build.\n\nArgs:\n    as many as you like", None, {}),
            ("Build.\n\nArgs:\n    other: a", None, {}),
            ("Build.\n\nArgs:", None, {}),
            ("Rows: a\n\nNote:\n    rows: a", None, {}),
            (
                "Build.\n\nArgs:\n    rows: a\n    other: b",
                "Build.\n\nArgs:\n    other: b",
                {"rows": "a"},
            ),
            ("Parameters\n----------\nrows, title : int\n    a", "", {"rows": "a", "title": "a"}),
            (
                "Parameters\n----------\nrows\n    a\n\nNot an entry.",
                "Not an entry.",
                {"rows": "a"},
            ),
            ("Parameters\nrows: a", None, {}),
            ("Build.\n:param rows: a\n:param other: b", "Build.\n:param other: b", {"rows": "a"}),
            ("Build.\n@param rows: a", "Build.", {"rows": "a"}),
            (":param Optional[dict[str, int]] rows: a", "", {"rows": "a"}),
            (":type rows: int", "", {}),
        ],
    )
    def test_other_texts(self, docstring: str, rest: str | None, found: dict[str, str]) -> None:
        expected = docstring if rest is None else rest
        assert split(docstring, ("rows", "title")) == (expected, found)


class TestTools:
    @pytest.mark.parametrize("docstring", [GOOGLE, NUMPY, REST])
    def test_entries_become_descriptions(self, docstring: str) -> None:
        def build(call: Call, rows: int, title: str = "", tags: list[str] = []) -> None: ...  # noqa: B006

        build.__doc__ = docstring
        tool = make_tool(build)
        properties = tool.input_schema["properties"]
        assert {name: node["description"] for name, node in properties.items()} == {
            name: FOUND[name] for name in ("rows", "title", "tags")
        }
        assert tool.description is not None
        assert "How many rows" not in tool.description
        assert make_tool(build, description="Other.").description == "Other."
        assert make_tool(build, description="Other.").input_schema == tool.input_schema

    def test_a_given_schema_leaves_the_docstring_whole(self) -> None:
        def build(rows: int) -> None:
            """Build.

            Args:
                rows: how many
            """

        tool = make_tool(build, input_schema={"type": "object"})
        assert tool.description == "Build.\n\nArgs:\n    rows: how many"
        assert tool.input_schema == {"type": "object"}

    @pytest.mark.parametrize(
        "annotation",
        [
            Annotated[int, "how many"],
            Annotated[int, Meta(ge=1), "how many"],
            Annotated[int, "how many", Field(ge=1)],
            Annotated[int, "of another kind", Meta(description="how many")],
            Annotated[int, Field(description="how many"), "of another kind"],
            Annotated[int, typing_extensions.Doc("how many")],
            Annotated[int, "of another kind", typing_extensions.Doc("how many")],
            Annotated[int, doc("how many")],
            Annotated[int, "how many"] | None,
        ],
    )
    def test_an_annotation_describes_its_parameter(self, annotation: Any) -> None:
        assert taking(annotation).input_schema["properties"]["x"]["description"] == "how many"

    def test_an_annotation_wins_over_the_docstring(self) -> None:
        def build(rows: Annotated[int, "from here"], title: str) -> None:
            """Build.

            Args:
                rows: from there
                title: its title
            """

        tool = make_tool(build)
        properties = tool.input_schema["properties"]
        assert properties["rows"]["description"] == "from here"
        assert properties["title"]["description"] == "its title"
        assert tool.description == "Build."

    def test_an_argument_with_an_alias_is_described_by_its_parameter(self) -> None:
        def build(rows: Annotated[int, Field(alias="rowCount")]) -> None:
            """Build.

            Args:
                rows: how many
            """

        properties = make_tool(build).input_schema["properties"]
        assert properties["rowCount"]["description"] == "how many"
