"""Settings of the command: the command line, the environment, a TOML file."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs import HERE
from tests.rigs.command import Done, run
from tests.wire.process import ServerProcess

APP = f"{HERE / 'command_server.py'}:server"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), app=APP) as server:
        yield server


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.toml"


def tokens_of(done: Done) -> str:
    """The file of tokens that `serve` has looked for: each test names others that are missing."""
    assert done.returncode == 2, done.stderr
    said: str = done.shown[-1]
    return said.partition("The tokens in ")[2].partition(" cannot be read")[0]


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(
    file: Path,
) -> None:
    file.write_text('[serve]\nws = "127.0.0.1:0"\nauth-tokens = "of-file"\n')
    told = {"MCP_STREAMS_SERVE_AUTH_TOKENS": "of-environment"}
    from_file = ("serve", APP, "--config", str(file))
    assert tokens_of(run(*from_file)) == "of-file"
    assert tokens_of(run(*from_file, env=told)) == "of-environment"
    assert tokens_of(run(*from_file, "--auth-tokens=of-line", env=told)) == "of-line"
    alone = ("serve", APP, "--ws=127.0.0.1:0")
    assert tokens_of(run(*alone, env=told)) == "of-environment"


@pytest.mark.parametrize("way", ["before", "equals", "variable", "home", "XDG"])
def test_the_file_has_a_place_or_is_named(tmp_path: Path, way: str) -> None:
    home = tmp_path / "home"
    folder = home / (".xdg" if way == "XDG" else ".config") / "mcp-streams"
    folder.mkdir(parents=True)
    place = folder / "config.toml" if way in ("home", "XDG") else tmp_path / "own.toml"
    place.write_text('[serve]\nws = "127.0.0.1:0"\nauth_tokens = "of-file"\n')
    env = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".xdg") if way == "XDG" else ""}
    if way == "variable":
        env["MCP_STREAMS_CONFIG"] = str(place)
    words = ["serve", APP]
    if way == "before":
        words = ["--config", str(place), *words]
    elif way == "equals":
        words.append(f"--config={place}")
    assert tokens_of(run(*words, env=env)) == "of-file"


def test_a_file_sets_lists_and_flags(server: ServerProcess, file: Path) -> None:
    file.write_text('[tools]\njson = true\n[serve]\nlimit = ["streams_max=3", "steams=1"]\n')
    assert json.loads(run("tools", server.url, "--config", str(file)).stdout)
    done = run("serve", APP, "--config", str(file))
    assert "--limit: unknown steams" in done.stderr
    env = {"MCP_STREAMS_TOOLS_JSON": "false"}
    assert run("tools", server.url, "--config", str(file), env=env).stdout.startswith("tool  ")


def test_with_json_from_a_setting_errors_are_json(file: Path) -> None:
    file.write_text("[tools]\njson = true\n")
    done = run("tools", "ftp://127.0.0.1", "--config", str(file))
    assert "message" in json.loads(done.stderr)["error"]
    done = run("tools", "ftp://127.0.0.1", env={"MCP_STREAMS_TOOLS_JSON": "1"})
    assert "message" in json.loads(done.stderr)["error"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[sevre]\nws = "a-secret"', "sevre is no setting of mcp-streams; did you mean serve?"),
        ('[serve]\nwss = "a-secret"', "serve.wss is no setting of mcp-streams serve; did you mean"),
        ('[call]\ntimeuot = "a-secret"', "call.timeuot is no setting of mcp-streams call; did you"),
        ('[token.new]\nexpirse = "a-secret"', "token.new.expirse is no setting of mcp-streams tok"),
        ('json = "a-secret"', "json is no setting of mcp-streams"),
        ('serve = "a-secret"', "write its settings in a table: [serve]."),
        ('[serve]\na-secret\nws = "x"', "is no TOML: "),
        ('[serve]\nws = "\xff"', "is no TOML: "),
    ],
)
def test_an_error_names_the_file_the_key_and_the_nearest_one(
    file: Path, text: str, why: str
) -> None:
    file.write_bytes(text.encode("latin-1"))
    done = run("tools", "ws://127.0.0.1:1", "--config", str(file))
    assert (done.returncode, done.stdout, len(done.shown)) == (2, "", 1)
    assert done.stderr.startswith(f"{file}")
    assert why in done.stderr
    assert "a-secret" not in done.stderr


def test_a_value_that_does_not_fit_is_told_with_its_place(file: Path) -> None:
    file.write_text('[tools]\ntimeout = "soon"\n')
    done = run("tools", "ws://127.0.0.1:1", "--config", str(file), "--json")
    assert done.returncode == 2
    error = json.loads(done.stderr)["error"]["message"]
    assert "timeout" in error
    assert str(file) in error
    env = {"MCP_STREAMS_TOOLS_TIMEOUT": "soon"}
    done = run("tools", "ws://127.0.0.1:1", "--json", env=env)
    assert "MCP_STREAMS_TOOLS_TIMEOUT" in json.loads(done.stderr)["error"]["message"]


@pytest.mark.parametrize("words", [["--config"], ["--config", "nowhere.toml"], ["--config=."]])
def test_a_file_that_is_not_there_is_refused(tmp_path: Path, words: list[str]) -> None:
    done = run("tools", "ws://127.0.0.1:1", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout, len(done.shown)) == (2, "", 1)


def test_a_damaged_file_does_not_take_the_help_away(file: Path) -> None:
    file.write_text("[")
    for words in (("--help",), ("--version",), ("call", "--help")):
        assert run(*words, "--config", str(file)).returncode == 0


def test_a_file_that_others_may_change_is_refused(file: Path) -> None:
    file.write_text("[tools]\njson = true\n")
    file.chmod(0o666)
    done = run("tools", "ws://127.0.0.1:1", "--config", str(file))
    assert (done.returncode, len(done.shown)) == (2, 1)
    assert str(file) in done.stderr


def test_variables_that_are_no_settings_are_left_alone(server: ServerProcess) -> None:
    env = {"MCP_STREAMS_SERVICE_HOST": "x", "MCP_STREAMS_TOOLS_NOTHING": "x"}
    assert run("tools", server.url, env=env).returncode == 0


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("JORNAL", "a-secret", "is no option; did you mean MCP_STREAMS_SERVE_JOURNAL?"),
        ("LEESE", "a-secret", "is no option; did you mean MCP_STREAMS_SERVE_LEASE?"),
        ("JOURNAL", "", "is empty: give it a value, or unset it."),
    ],
)
def test_a_variable_that_is_misspelt_or_empty_is_refused(name: str, value: str, why: str) -> None:
    done = run("serve", APP, env={f"MCP_STREAMS_SERVE_{name}": value})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.shown == [f"MCP_STREAMS_SERVE_{name} {why}"]


def test_a_place_of_a_variable_is_no_second_place(tmp_path: Path) -> None:
    password = {"MCP_STREAMS_LS_JOURNAL": "redis://mcp:a-secret@127.0.0.1:1/0"}
    done = run("ls", "--admin=unix:nowhere", env=password, cwd=tmp_path)
    assert "nowhere" in done.stderr
    assert "redis" not in done.stderr
    done = run("ls", "nowhere.db", env=password, cwd=tmp_path)
    assert "nowhere.db" in done.stderr
    both = password | {"MCP_STREAMS_LS_ADMIN": "unix:nowhere"}
    done = run("ls", env=both, cwd=tmp_path)
    why = "--admin unix:nowhere and --journal redis://127.0.0.1:1/0: name one place."
    assert done.shown == [why]


def test_the_completion_is_installed(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "SHELL": "/bin/bash"}
    for shell in ("bash", "zsh", "fish"):
        done = run("--install-completion", f"--shell={shell}", env=env)
        assert (done.returncode, done.stderr) == (0, "")
        path = Path(done.stdout.split()[4].rstrip(":"))
        assert path.is_relative_to(tmp_path)
        assert "token-file" in path.read_text()
