"""An MCP server over stdio whose tools misbehave, one way each. Plain Python: no library helps it.

Its environment says what it does at the start (`NAUGHTY_START`), and which revision it speaks
(`NAUGHTY_REVISION`). In JSON, `NAUGHTY_HELLO` has other members of its answer to `initialize`, and
`NAUGHTY_DATA` the data of its refusal. With `NAUGHTY_LOG` it writes each line that it reads into
that file.
"""

import itertools
import json
import os
import signal
import sys
import threading
import time
from typing import Any

Json = dict[str, Any]

LOG = os.environ.get("NAUGHTY_LOG")
STATE: Json = {"calls": 0, "level": None, "subscribed": [], "client": None, "answers": []}
TASKS: set[str] = set()
LOCK = threading.Lock()
WAITING: dict[Any, Any] = {}  # the calls that wait for an answer of the client
NUMBERS = itertools.count(1)


def write(data: bytes) -> None:
    with LOCK:
        view = memoryview(data)
        while view:
            view = view[os.write(1, view) :]


def say(message: Json) -> None:
    write(json.dumps({"jsonrpc": "2.0"} | message).encode() + b"\n")


def answer(id: Any, text: str = "done", **more: Any) -> None:
    say({"id": id, "result": {"content": [{"type": "text", "text": text}], **more}})


def tell(method: str, **params: Any) -> None:
    say({"method": method, "params": params})


def log(data: Any) -> None:
    tell("notifications/message", level="info", data=data)


def progress(token: Any, progress: float) -> None:
    tell("notifications/progress", progressToken=token, progress=progress)


def ask(then: Any, method: str, **params: Any) -> Any:
    """Send a request to the client; `then` is called with the answer."""
    asked = f"q{next(NUMBERS)}"
    WAITING[asked] = then
    say({"id": asked, "method": method, "params": params})
    return asked


# Tools: each is called with the id of the call, its arguments and its progress token.


def echo(id: Any, given: Json, token: Any) -> None:
    answer(id, json.dumps(given))


def state(id: Any, given: Json, token: Any) -> None:
    answer(id, json.dumps(STATE | {"pid": os.getpid()}))


def count(id: Any, given: Json, token: Any) -> None:
    for number in range(1, given["n"] + 1):
        progress(token, number)
        log(number)
    answer(id, "counted")


def flood(id: Any, given: Json, token: Any) -> None:
    line = json.dumps(
        {"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": "x" * 1000}}
    )
    for _ in range(given["n"]):
        write(line.encode() + b"\n")
    if given.get("ends", True):
        answer(id)


def garbage(id: Any, given: Json, token: Any) -> None:
    for number in range(given["n"]):
        write(given.get("line", "garbage {number}").format(number=number).encode() + b"\n")
    answer(id)


def answers(id: Any, given: Json, token: Any) -> None:
    """Answers with any line, in which ID stands for the id, and FF for a byte that is no UTF-8."""
    line = given["line"].encode().replace(b"FF", b"\xff").replace(b"ID", str(id).encode())
    write(line + b"\n")


def leave(id: Any, given: Json, token: Any) -> None:
    for number in range(given.get("first", 0)):
        log(number)
    sys.stderr.write(given.get("words", "last words") + "\n")
    sys.stderr.flush()
    if "signal" in given:
        os.kill(os.getpid(), getattr(signal, given["signal"]))
    os._exit(given.get("code", 0))


def twice(id: Any, given: Json, token: Any) -> None:
    answer(id, "first")
    answer(id, "second")


def never(id: Any, given: Json, token: Any) -> None:
    log("never")


def late(id: Any, given: Json, token: Any) -> None:
    """Answers a second after it was cancelled, and says something before."""
    STATE["late"] = id
    log("late")


def huge(id: Any, given: Json, token: Any) -> None:
    text = "x" * given["bytes"]
    kind = given.get("as", "result last")
    if kind == "result last":
        answer(id, text)
    elif kind == "id last":
        result = {"content": [{"type": "text", "text": text}]}
        write(json.dumps({"result": result, "jsonrpc": "2.0", "id": id}).encode() + b"\n")
    elif kind == "notification":
        log(text)
        answer(id)
    else:
        ask(lambda message: answer(id, json.dumps(message)), "roots/list", text=text)


def after(id: Any, given: Json, token: Any) -> None:
    """Reports progress after the response."""
    progress(token, 1)
    answer(id)
    progress(token, 2)


def question(id: Any, given: Json, token: Any) -> None:
    def then(message: Json) -> None:
        STATE["answers"].append(message)
        answer(id, json.dumps(message.get("result", message.get("error"))))

    ask(then, given.get("method", "elicitation/create"), **given.get("params", {"message": "?"}))


def questions(id: Any, given: Json, token: Any) -> None:
    """Asks many questions at once, and logs each refusal."""
    answers: list[Json] = []

    def then(message: Json) -> None:
        answers.append(message)
        if "error" in message:
            tell("notifications/message", level="info", data="refused")
        if len(answers) == given["n"]:
            answer(id, json.dumps(["result" in each for each in answers]))

    for _ in range(given["n"]):
        ask(then, "elicitation/create", message="?")


def dying_question(id: Any, given: Json, token: Any) -> None:
    ask(lambda message: None, "elicitation/create", message="?")
    time.sleep(given.get("after", 0.2))
    os._exit(7)


def withdrawn(id: Any, given: Json, token: Any) -> None:
    asked = ask(lambda message: None, "elicitation/create", message="?")
    tell("notifications/cancelled", requestId=asked, reason="no longer needed")
    answer(id)


def stray(id: Any, given: Json, token: Any) -> None:
    """Answers, perhaps after a notification, and asks or tells something afterwards."""
    if "first" in given:
        tell(given["first"])
    answer(id)
    if "ask" in given:
        ask(STATE["answers"].append, given["ask"], **given.get("params", {}))
    for method in given.get("tell", []):
        tell(method, **given.get("params", {}))


def fork(id: Any, given: Json, token: Any) -> None:
    """Forks a child that keeps all pipes open, and ends."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
        os._exit(0)
    with open(given["file"], "w") as file:
        file.write(str(pid))
    if given.get("dies", True):
        os._exit(3)
    answer(id, str(pid))


def deaf(id: Any, given: Json, token: Any) -> None:
    """Answers, then reads nothing more for a while."""
    answer(id)
    time.sleep(given["s"])


def shut(id: Any, given: Json, token: Any) -> None:
    """Closes its output, or its input, and lives on."""
    os.close(given["fd"])
    time.sleep(600)


def task(id: Any, given: Json, token: Any) -> None:
    TASKS.add("t1")
    say({"id": id, "result": {"task": {"taskId": "t1", "status": "working"}}})


def own_token(id: Any, given: Json, token: Any) -> None:
    answer(id, json.dumps({"token": token, "type": type(token).__name__}))


def once(id: Any, given: Json, token: Any) -> None:
    """Dies at the first run, in the middle; says the same again at the second."""
    for number in range(given["n"]):
        log(number)
        progress(token, number)
        if number == given["at"] and not os.path.exists(given["file"]):
            open(given["file"], "w").close()
            time.sleep(given.get("s", 0))
            os._exit(9)
    answer(id, "twice")


def once_asking(id: Any, given: Json, token: Any) -> None:
    """Asks, dies after the answer at the first run, and asks the same again."""

    def then(message: Json) -> None:
        if not os.path.exists(given["file"]):
            open(given["file"], "w").close()
            os._exit(9)
        answer(id, json.dumps(message["result"]))

    ask(then, "elicitation/create", message="?")
    if given.get("early") and not os.path.exists(given["file"]):
        open(given["file"], "w").close()
        time.sleep(0.2)
        os._exit(9)


def other(id: Any, given: Json, token: Any) -> None:
    """Says something else at each run, and dies at the first."""
    log(os.getpid())
    tell("notifications/other", pid=os.getpid())
    if not os.path.exists(given["file"]):
        open(given["file"], "w").close()
        os._exit(9)
    answer(id)


TOOLS = {
    each.__name__: each
    for each in (
        echo,
        state,
        count,
        flood,
        garbage,
        leave,
        answers,
        twice,
        never,
        late,
        huge,
        after,
        question,
        questions,
        dying_question,
        withdrawn,
        stray,
        fork,
        deaf,
        shut,
        task,
        own_token,
        once,
        once_asking,
        other,
    )
}
HINTS = {
    "echo": {"readOnlyHint": True},
    "once": {"idempotentHint": True},
    "other": {"readOnlyHint": "false"},
}


def tools() -> list[Json]:
    listed = []
    for name in TOOLS:
        tool: Json = {"name": name, "inputSchema": {"type": "object"}}
        if name in HINTS:
            tool["annotations"] = HINTS[name]
        listed.append(tool)
    marker = os.environ.get("NAUGHTY_MARKER")
    if marker and os.path.exists(marker):
        listed.append({"name": "new", "inputSchema": {"type": "object"}})
    return listed


def initialize(id: Any, params: Json) -> None:
    STATE["client"] = params
    start = os.environ.get("NAUGHTY_START")
    if start == "silent":
        sys.stderr.write("I am silent\n")
        sys.stderr.flush()
        return
    if start == "refuses":
        data = json.loads(os.environ.get("NAUGHTY_DATA", '{"a": 1}'))
        say({"id": id, "error": {"code": -32000, "message": "Not today", "data": data}})
        return
    hello = {
        "protocolVersion": os.environ.get("NAUGHTY_REVISION", params["protocolVersion"]),
        "capabilities": {
            "tools": {"listChanged": True},
            "experimental": {"theirs": {"x": 1}},
            "tasks": {},
        },
        "serverInfo": {"name": "naughty", "version": "1", "extra": True},
        "instructions": "Beware.",
    }
    say({"id": id, "result": hello | json.loads(os.environ.get("NAUGHTY_HELLO", "{}"))})


def initialized(id: Any, params: Json) -> None:
    STATE["initialized"] = STATE.get("initialized", 0) + 1
    if os.environ.get("NAUGHTY_START") == "asks":
        ask(STATE["answers"].append, "roots/list")


def cancelled(id: Any, params: Json) -> None:
    STATE["cancelled"] = params
    if STATE.get("late") == params["requestId"]:
        log("too late")
        answer(params["requestId"], "too late")


def list_tools(id: Any, params: Json) -> None:
    say({"id": id, "result": {"tools": tools()}})


def set_level(id: Any, params: Json) -> None:
    STATE["level"] = params["level"]
    say({"id": id, "result": {}})


def subscribe(id: Any, params: Json) -> None:
    STATE["subscribed"].append(params["uri"])
    say({"id": id, "result": {}})


def unsubscribe(id: Any, params: Json) -> None:
    STATE["subscribed"].remove(params["uri"])
    say({"id": id, "result": {}})


def call(id: Any, params: Json) -> None:
    STATE["calls"] += 1
    token = params.get("_meta", {}).get("progressToken")
    tool = TOOLS.get(params["name"])
    if tool is None:
        say({"id": id, "error": {"code": -32602, "message": f"Unknown: {params['name']}"}})
    else:
        tool(id, params.get("arguments", {}), token)


def task_result(id: Any, params: Json) -> None:
    if params["taskId"] not in TASKS:
        say({"id": id, "error": {"code": -32602, "message": "No such task"}})
        return
    meta = {"io.modelcontextprotocol/related-task": {"taskId": params["taskId"]}}
    ask(lambda message: answer(id, "of the task"), "elicitation/create", message="?", _meta=meta)


METHODS = {
    "initialize": initialize,
    "notifications/initialized": initialized,
    "notifications/cancelled": cancelled,
    "tools/list": list_tools,
    "logging/setLevel": set_level,
    "resources/subscribe": subscribe,
    "resources/unsubscribe": unsubscribe,
    "tools/call": call,
    "tasks/result": task_result,
}


def handle(message: Json) -> None:
    number, params = message.get("id"), message.get("params") or {}
    method = message.get("method")
    if method is None:
        if number in WAITING:
            WAITING.pop(number)(message)
    elif method in METHODS:
        METHODS[method](number, params)
    elif number is None:
        STATE.setdefault("told", []).append(message)
    elif method.startswith("acme/"):
        say({"id": number, "result": {"method": method, "given": params}, "extra": [1]})
    else:
        error = {"code": -32601, "message": "Method not found", "data": [1]}
        say({"id": number, "error": error})


def main() -> None:
    start = os.environ.get("NAUGHTY_START")
    if start == "exit":
        sys.stderr.write("I cannot start: no database\n")
        sys.exit(int(os.environ.get("NAUGHTY_CODE", "3")))
    if start == "garbage":
        for number in range(200):
            write(f"garbage {number}\n".encode())
    if start == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        if LOG:
            with open(LOG, "ab") as file:
                file.write(line)
        handle(json.loads(line))
    if start == "stubborn":
        time.sleep(600)


if __name__ == "__main__":
    main()
