"""Whole conversations of official clients with other people's servers, written down.

A transcript has what the client sent and what it was answered, request by request; the questions
that it was asked; and all other messages. Ids and tokens of progress are left out, as is the order
of messages that belong to no request: over HTTP they come beside the responses. News of which only
the latest matters is written down once, however often it comes.
"""

import base64
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.sdk.stock import HERE, Node

Json = dict[str, Any]

# Without a locale, Python sets one for itself, and so for the processes that it starts.
LOCALE: Final = {"LC_ALL": "C.UTF-8"}
RUN_S: Final = 40.0

_CLOCK: Final = re.compile(r"\b\d{1,2}:\d\d:\d\d(\s[AP]M)?")
_FILE_TIMES: Final = re.compile(r"(created|modified|accessed): [^\n]*")
# server-everything logs one of these when it is asked to, by chance.
_SIMULATED: Final = re.compile(r"-level message|level-message")
_NEWS: Final = re.compile(r"/list_changed$|^notifications/resources/updated$")

# The names of our extension, which the wrapper adds to the capabilities.
_OURS: Final = "mcp-streams"


@dataclass(frozen=True)
class Conversation:
    """A server's command, and what a client does with it.

    A step is a request (`method`, `params`, and `cancel` to cancel it at the first progress), a
    notification, or a wait until so many messages of some methods have come (`await`).
    """

    name: str
    command: Sequence[str]
    steps: Sequence[Json]
    answers: Mapping[str, Json]
    environment: Mapping[str, str] = field(default_factory=lambda: LOCALE)
    prepare: Callable[[], None] = lambda: None

    @property
    def called(self) -> set[str]:
        """The tools that are called."""
        calls = [step["params"] for step in self.steps if step.get("method") == "tools/call"]
        return {params["name"] for params in calls}


# Steps


def call(name: str, /, **arguments: Any) -> Json:
    return {"method": "tools/call", "params": {"name": name, "arguments": arguments}}


def asked(method: str, /, **params: Any) -> Json:
    return {"method": method, "params": params}


def until(**methods: int) -> Json:
    """Wait; `__` stands for a slash."""
    return {"await": {name.replace("__", "/"): number for name, number in methods.items()}}


def bad(names: Sequence[str]) -> list[Json]:
    """Calls of each tool with arguments that it cannot take."""
    return [call(name, path=7, query=[], entities="none", names={}) for name in names]


LISTS: Final = [
    asked(method)
    for method in ("tools/list", "resources/list", "resources/templates/list", "prompts/list")
]
# Requests for any server, however little it knows.
ANYWAY: Final = [
    call("no-such-tool"),
    asked("resources/read", uri="no-such://resource"),
    asked("prompts/get", name="no-such-prompt"),
    asked("completion/complete", ref={"type": "ref/prompt", "name": "x"}, argument={}),
    asked("logging/setLevel", level="nonsense"),
    asked("example.com/no-such-method", some="params"),
    asked("ping"),
]

ANSWERS: Final[Json] = {
    "sampling/createMessage": {
        "role": "assistant",
        "content": {"type": "text", "text": "sampled"},
        "model": "none",
        "stopReason": "endTurn",
    },
    "elicitation/create": {
        "action": "accept",
        "content": {"name": "elicited", "username": "elicited", "email": "e@example.com"},
    },
    "roots/list": {"roots": [{"uri": "file:///srv/ours", "name": "ours"}]},
}


def everything(node: Node) -> Conversation:
    """The reference server."""
    uri, text, blob = (
        f"demo://resource/{rest}"
        for rest in ("static/document/features.md", "dynamic/text/1", "dynamic/blob/2")
    )
    data = "data:text/plain,hello"
    steps = [
        until(roots__list=1, notifications__message=1),
        *LISTS,
        call("echo", message="hello"),
        call("echo", message=7),
        call("get-annotated-message", messageType="error", includeImage=True),
        call("get-annotated-message", messageType="none"),
        call("get-env"),
        call("get-resource-links", count=2),
        call("get-resource-links", count=200),
        call("get-resource-reference", resourceType="Text", resourceId=1),
        call("get-resource-reference", resourceType="Blob", resourceId=-1),
        call("get-structured-content", location="Chicago"),
        call("get-structured-content", location="Atlantis"),
        call("get-sum", a=1, b=2.5),
        call("get-sum", a="one"),
        call("get-tiny-image"),
        call("get-roots-list"),
        call("gzip-file-as-resource", name="a.gz", data=data, outputType="resource"),
        call("gzip-file-as-resource", name="b.gz", data=data),
        call("gzip-file-as-resource", data="nonsense"),
        asked("resources/list"),
        asked("resources/read", uri="demo://resource/session/b.gz"),
        call("trigger-sampling-request", prompt="hello", maxTokens=10),
        call("trigger-elicitation-request"),
        call("trigger-url-elicitation", url="https://example.com/", elicitationId="1"),
        call("trigger-long-running-operation", duration=0.2, steps=4),
        {**call("trigger-long-running-operation", duration=60, steps=300), "cancel": True},
        call("toggle-simulated-logging"),
        call("toggle-simulated-logging"),
        call("simulate-research-query", topic="cuts"),
        asked("logging/setLevel", level="debug"),
        asked("resources/read", uri=uri),
        asked("resources/read", uri=text),
        asked("resources/read", uri=blob),
        asked("resources/subscribe", uri=text),
        call("toggle-subscriber-updates"),
        until(notifications__resources__updated=1),
        call("toggle-subscriber-updates"),
        asked("resources/unsubscribe", uri=text),
        asked("prompts/get", name="simple-prompt"),
        asked("prompts/get", name="args-prompt", arguments={"city": "Bonn"}),
        asked("prompts/get", name="args-prompt", arguments={}),
        asked(
            "prompts/get",
            name="completable-prompt",
            arguments={"department": "Sales", "name": "Eve"},
        ),
        asked(
            "prompts/get",
            name="resource-prompt",
            arguments={"resourceType": "Text", "resourceId": "1"},
        ),
        asked(
            "completion/complete",
            ref={"type": "ref/prompt", "name": "completable-prompt"},
            argument={"name": "name", "value": "E"},
            context={"arguments": {"department": "Sales"}},
        ),
        asked(
            "completion/complete",
            ref={"type": "ref/resource", "uri": "demo://resource/dynamic/text/{resourceId}"},
            argument={"name": "resourceId", "value": "1"},
        ),
        {"method": "notifications/roots/list_changed"},
        until(roots__list=2),
        *ANYWAY,
    ]
    return Conversation("everything", _npm(node, "everything"), steps, ANSWERS)


def memory(node: Node, folder: Path) -> Conversation:
    """A server that keeps a graph in a file."""
    file = folder / "memory.jsonl"
    entity = {"name": "Ada", "entityType": "person", "observations": ["counts"]}
    relation = {"from": "Ada", "to": "Bob", "relationType": "knows"}
    steps = [
        *LISTS,
        call("create_entities", entities=[entity, {**entity, "name": "Bob"}]),
        call("create_relations", relations=[relation]),
        call("add_observations", observations=[{"entityName": "Ada", "contents": ["writes"]}]),
        call("add_observations", observations=[{"entityName": "Eve", "contents": ["no"]}]),
        call("search_nodes", query="writes"),
        call("open_nodes", names=["Bob"]),
        call("delete_observations", deletions=[{"entityName": "Ada", "observations": ["counts"]}]),
        call("delete_relations", relations=[relation]),
        call("delete_entities", entityNames=["Bob"]),
        call("read_graph"),
        *bad(["create_entities", "create_relations", "add_observations", "delete_entities"]),
        *bad(["delete_observations", "delete_relations", "search_nodes", "open_nodes"]),
        asked("resources/read", uri="memory://knowledge-graph"),
        asked("resources/subscribe", uri="memory://knowledge-graph"),
        *ANYWAY,
    ]
    return Conversation(
        "memory",
        _npm(node, "memory"),
        steps,
        ANSWERS,
        {**LOCALE, "MEMORY_FILE_PATH": str(file)},
        lambda: file.unlink(missing_ok=True),
    )


def filesystem(node: Node, folder: Path) -> Conversation:
    """A server for the files of a folder, which is the client's root."""
    note, image = str(folder / "note.txt"), str(folder / "pixel.png")

    def prepare() -> None:
        subprocess.run(["rm", "-rf", str(folder)], check=True)
        folder.mkdir()
        (folder / "pixel.png").write_bytes(b"\x89PNG\r\n")

    names = ["read_file", "read_text_file", "read_media_file", "read_multiple_files"]
    names += ["write_file", "edit_file", "create_directory", "list_directory"]
    names += ["list_directory_with_sizes", "directory_tree", "move_file", "search_files"]
    edit = {"oldText": "two", "newText": "zwei"}
    steps = [
        until(roots__list=1),
        *LISTS,
        call("write_file", path=note, content="one\ntwo\nthree\n"),
        call("read_file", path=note),
        call("read_text_file", path=note, head=1),
        call("read_text_file", path="/etc/passwd"),
        call("read_media_file", path=image),
        call("read_multiple_files", paths=[note, note + "?"]),
        call("edit_file", path=note, edits=[edit], dryRun=True),
        call("edit_file", path=note, edits=[edit]),
        call("create_directory", path=str(folder / "sub" / "sub")),
        call("move_file", source=image, destination=str(folder / "sub" / "moved.png")),
        call("list_directory", path=str(folder)),
        call("list_directory_with_sizes", path=str(folder), sortBy="size"),
        call("directory_tree", path=str(folder)),
        call("search_files", path=str(folder), pattern="**/*.png"),
        call("get_file_info", path=note),
        call("list_allowed_directories"),
        *bad([*names, "get_file_info"]),
        *ANYWAY,
    ]
    roots = {"roots": [{"uri": folder.as_uri(), "name": "ours"}]}
    answers = {**ANSWERS, "roots/list": roots}
    command = [*_npm(node, "filesystem"), str(folder)]
    return Conversation("filesystem", command, steps, answers, prepare=prepare)


def sdk_server() -> Conversation:
    """A server made with the official SDK's decorators."""
    plain = ["test_simple_text", "test_image_content", "test_audio_content"]
    plain += ["test_embedded_resource", "test_multiple_content_types", "test_tool_with_logging"]
    plain += ["test_tool_with_progress", "test_error_handling", "test_reconnection"]
    plain += ["test_elicitation_sep1034_defaults", "test_elicitation_sep1330_enums"]
    steps = [
        *LISTS,
        *(call(name) for name in plain),
        call("test_sampling", prompt="hello"),
        call("test_sampling"),
        call("test_elicitation", message="hello"),
        call("test_elicitation", message=[]),
        call("json_schema_2020_12_tool", name="Ada", address={"city": "Bonn"}),
        call("json_schema_2020_12_tool", name={}),
        asked("logging/setLevel", level="info"),
        asked("resources/read", uri="test://static-text"),
        asked("resources/read", uri="test://static-binary"),
        asked("resources/read", uri="test://template/7/data"),
        asked("resources/subscribe", uri="test://watched-resource"),
        asked("resources/unsubscribe", uri="test://watched-resource"),
        asked("prompts/get", name="test_simple_prompt"),
        asked("prompts/get", name="test_prompt_with_image"),
        asked("prompts/get", name="test_prompt_with_arguments", arguments={"arg1": "1"}),
        asked(
            "prompts/get", name="test_prompt_with_arguments", arguments={"arg1": "1", "arg2": "2"}
        ),
        asked(
            "prompts/get",
            name="test_prompt_with_embedded_resource",
            arguments={"resourceUri": "test://x"},
        ),
        asked(
            "completion/complete",
            ref={"type": "ref/prompt", "name": "test_prompt_with_arguments"},
            argument={"name": "arg1", "value": "par"},
        ),
        *ANYWAY,
    ]
    return Conversation("sdk", _python("conformance_sdk_server.py"), steps, ANSWERS)


def lowlevel() -> Conversation:
    """A server made with the official SDK's low-level API."""
    steps = [
        *LISTS,
        asked("tools/list", cursor="2"),
        call("greet", name="Ada"),
        call("greet"),
        call("fail"),
        call("roots"),
        call("change"),
        until(notifications__tools__list_changed=1, notifications__resources__updated=1),
        {**call("slow"), "cancel": True},
        asked("resources/read", uri="note://1"),
        *ANYWAY,
    ]
    return Conversation("lowlevel", _python("lowlevel_server.py"), steps, ANSWERS)


def _npm(node: Node, name: str) -> list[str]:
    package = node.modules / "@modelcontextprotocol" / f"server-{name}"
    return [str(node.path), str(package / "dist" / "index.js")]


def _python(file: str) -> list[str]:
    return [sys.executable, str(HERE / file)]


# Transcripts


def hold(client: str, node: Node, conversation: Conversation, where: Json) -> Json:
    """Have an official client make the conversation; returns what it wrote down, compared."""
    python = [sys.executable, str(HERE / "transcript_python.py")]
    script = [str(node.path), str(HERE / "transcript_typescript.mjs")]
    # `mode`: the SDK's revision of 2026 has no `initialize`, and wrap has no such sessions.
    given = {"where": where, "steps": conversation.steps, "mode": "legacy"}
    done = subprocess.run(
        [
            *(python if client == "python" else script),
            json.dumps(given),
            json.dumps(conversation.answers),
        ],
        cwd=HERE,
        env=node.environment(**conversation.environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    recorded = json.loads(done.stdout)
    return _transcript(recorded["sent"], recorded["received"])


def _transcript(sent: list[Json], received: list[Json]) -> Json:
    answers = {each["id"]: each for each in received if "method" not in each}
    assert len(answers) == sum("method" not in each for each in received), "answered twice"
    cancels = [each for each in sent if each.get("method") == "notifications/cancelled"]
    cancelled = {each["params"]["requestId"] for each in cancels}
    progress: dict[Any, list[Json]] = {}
    for each in received:
        if each.get("method") == "notifications/progress":
            params = dict(each["params"])
            progress.setdefault(params.pop("progressToken"), []).append(params)
    requests = []
    for each in sent:
        if "id" not in each or "method" not in each:
            continue
        entry = {"method": each["method"], "params": _without_token(each.get("params") or {})}
        if each["id"] not in cancelled:  # an answer may have crossed the cancel
            answer = answers.get(each["id"], {})
            entry |= {name: answer.get(name) for name in ("result", "error")}
            entry["progress"] = progress.get(_token(each), [])
        requests.append(entry)
    others = [each for each in received if "method" in each]
    return _neutral(
        {
            "requests": requests,
            "questions": _sorted(each for each in others if "id" in each),
            "notifications": _sorted(
                each
                for each in others
                if "id" not in each and each["method"] != "notifications/progress"
            ),
        }
    )


def _token(request: Json) -> Any:
    return ((request.get("params") or {}).get("_meta") or {}).get("progressToken")


def _without_token(params: Json) -> Json:
    meta = {key: of for key, of in (params.get("_meta") or {}).items() if key != "progressToken"}
    rest = {key: of for key, of in params.items() if key != "_meta"}
    return {**rest, "_meta": meta} if meta else rest


def _sorted(messages: Iterable[Json]) -> list[Json]:
    kept = [
        {"method": each["method"], "params": each.get("params")}
        for each in messages
        if not _SIMULATED.search(json.dumps(each.get("params")))
    ]
    ordered = sorted(kept, key=lambda each: json.dumps(each, sort_keys=True))
    return [
        each
        for number, each in enumerate(ordered)
        if not (_NEWS.search(each["method"]) and number and each == ordered[number - 1])
    ]


def _neutral(value: Any, name: str = "") -> Any:
    """Without our extension in the capabilities, and without times."""
    if isinstance(value, dict):
        kept = {key: _neutral(of, key) for key, of in value.items()}
        if name == "capabilities":
            for room in ("experimental", "extensions"):
                others = {k: v for k, v in (kept.pop(room, None) or {}).items() if _OURS not in k}
                kept |= {room: others} if others else {}
        return kept
    if isinstance(value, list):
        return [_neutral(each) for each in value]
    if isinstance(value, str):
        if name == "blob":
            decoded = base64.b64decode(value)
            if b"created at" in decoded:
                return _CLOCK.sub("TIME", decoded.decode())
        if name in ("text", "content"):
            return _FILE_TIMES.sub(r"\1: TIME", _CLOCK.sub("TIME", value))
    return value
