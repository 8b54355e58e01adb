"""`help` shows what a user may use, and all of it."""

import inspect
import pkgutil
import pydoc
import re
import subprocess
import sys

import pytest

import streams
import transports
from streams.server.tools import DEFAULTS, ToolSettings


def shown(thing: object) -> str:
    return pydoc.plain(pydoc.render_doc(thing))


def test_help_shows_the_public_names_and_no_modules() -> None:
    text = shown(streams)
    assert "PACKAGE CONTENTS" not in text
    assert "SUBMODULES" not in text
    for name in streams.__all__:
        assert re.search(rf"\b{name}\b", text), name
    for name in ("Client", "RunningCall", "Server", "Tool"):
        assert f"    class {name}(" in text
    for name in ("peer", "reconnect", "committer"):
        assert not re.search(rf"^    {name}\b", text, re.MULTILINE)


def test_the_documentation_as_a_page_has_no_modules_either() -> None:
    assert "Package Contents" not in pydoc.html.docmodule(streams)


def test_everything_else_finds_the_modules() -> None:
    assert {"client", "server"} <= {each.name for each in pkgutil.iter_modules(streams.__path__)}
    assert streams.__spec__ is not None
    assert list(streams.__path__) == list(streams.__spec__.submodule_search_locations or ())
    assert inspect.getsourcefile(streams.Client)


def test_every_public_name_has_a_docstring_or_is_described_in_the_module() -> None:
    described = str(streams.__doc__)
    for name in streams.__all__:
        thing = getattr(streams, name)
        if isinstance(thing, type):
            assert thing.__doc__, name
    for name in ("Server", "Client", "RunningCall", "Ticket", "ClientError", "Tool", "Call"):
        assert f"`{name}`" in described


@pytest.mark.parametrize("package", [streams, transports])
def test_a_name_that_is_unknown_is_an_attribute_error(package: object) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'unknown'"):
        package.unknown  # type: ignore[attr-defined] # noqa: B018


def test_the_types_of_a_transport_are_public() -> None:
    for name in ("Channel", "ClientChannel", "Dialer", "Handler"):
        assert getattr(transports, name) is not None


def test_help_of_tool_shows_each_setting_with_its_meaning_and_default() -> None:
    text = shown(streams.Server.tool)
    parameters = inspect.signature(streams.Server.tool).parameters
    for name, default in DEFAULTS.items():
        assert re.search(rf"^ +{name}: \w+", text, re.MULTILINE), f"{name} has no meaning"
        assert parameters[name].default == default
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert "overflow: Literal['block', 'fail'] = 'block'" in text.replace("typing.", "")
    assert set(DEFAULTS) == set(ToolSettings.__annotations__)
    assert list(parameters)[:2] == ["self", "function"]


def test_streams_is_imported_without_all_of_it() -> None:
    code = "import sys, streams, transports; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert loaded.isdisjoint({"trio", "msgspec", "structlog", "streams.errors"})
