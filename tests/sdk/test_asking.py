"""The official Python SDK is asked, notified and told of new tools, over stdio and HTTP."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import pytest
from mcp import Client, MCPError, types
from mcp.client.stdio import StdioServerParameters

from tests.sdk.test_python_sdk import text_of
from tests.wire.process import CLI, ServerProcess

APP: Final = f"{Path(__file__).parent / 'asking_server.py'}:server"
PATIENCE_S: Final = 60.0

Talk = Callable[[Client, "Answers"], Awaitable[None]]


class Answers:
    """The callbacks of a host."""

    def __init__(self, action: Literal["accept", "decline", "cancel"], content: Any) -> None:
        self.action: Literal["accept", "decline", "cancel"] = action
        self.content = content
        self.asked: list[Any] = []
        self.told: asyncio.Queue[Any] = asyncio.Queue()

    async def elicit(self, context: object, params: Any) -> types.ElicitResult:
        self.asked.append(params)
        return types.ElicitResult(action=self.action, content=self.content)

    async def sample(self, context: object, params: Any) -> types.CreateMessageResult:
        self.asked.append(params)
        text = types.TextContent(type="text", text="Fine.")
        return types.CreateMessageResult(role="assistant", content=text, model="m")

    async def roots(self, context: object) -> types.ListRootsResult:
        root = types.Root.model_validate({"uri": "file:///a", "name": "a"})
        return types.ListRootsResult(roots=[root])

    async def tell(self, message: Any) -> None:
        self.told.put_nowait(message)

    async def next_told(self, kind: type) -> Any:
        while not isinstance(told := await self.told.get(), kind):
            pass
        return told


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), app=APP) as server:
        yield server


@pytest.fixture(params=("stdio", "http"))
def host(request: pytest.FixtureRequest) -> Callable[..., None]:
    if request.param == "stdio":
        target: Any = StdioServerParameters(command=CLI[0], args=[*CLI[1:], "serve", APP])
    else:
        target = f"http://127.0.0.1:{request.getfixturevalue('server').http_port}/mcp"

    def talk(
        talk: Talk, action: Any = "accept", content: Any = None, *, is_able: bool = True
    ) -> None:
        async def main() -> None:
            answers = Answers(action, content)
            able: dict[str, Any] = {
                "elicitation_callback": answers.elicit,
                "sampling_callback": answers.sample,
                "list_roots_callback": answers.roots,
            }
            async with asyncio.timeout(PATIENCE_S):
                async with Client(
                    target, message_handler=answers.tell, **(able if is_able else {})
                ) as client:
                    await talk(client, answers)

        asyncio.run(main())

    return talk


@pytest.mark.parametrize(
    ("action", "content", "result"),
    [
        ("accept", {"sure": True, "note": "soon"}, "True soon"),
        ("accept", {"sure": False}, "False "),
        ("decline", None, "decline"),
        ("cancel", None, "cancel"),
    ],
)
def test_a_form_is_filled_in(host: Any, action: str, content: Any, result: str) -> None:
    async def talk(client: Client, answers: Answers) -> None:
        assert text_of(await client.call_tool("ship", {"order": "A-1"})) == result
        (asked,) = answers.asked
        assert asked.message == "Ship A-1?"
        assert asked.requested_schema["properties"]["sure"]["description"] == "Ship it?"

    host(talk, action, content)


def test_a_form_that_does_not_fit_fails_the_call(host: Any) -> None:
    async def talk(client: Client, answers: Answers) -> None:
        failed = await client.call_tool("ship", {"order": "A-1"})
        assert failed.is_error

    host(talk, "accept", {"note": "nothing else"})


def test_a_url_a_sample_and_roots(host: Any) -> None:
    async def talk(client: Client, answers: Answers) -> None:
        assert text_of(await client.call_tool("ask_model", {})) == "Fine. m"
        assert answers.asked[0].system_prompt == "Be brief."
        assert answers.asked[0].max_tokens == 50
        assert "file:///a" in text_of(await client.call_tool("folders", {}))
        assert text_of(await client.call_tool("pay", {})) == "accept"
        assert answers.asked[1].url == "https://pay.example/7"

    host(talk)


def test_a_host_that_cannot_answer_is_not_asked(host: Any) -> None:
    async def talk(client: Client, answers: Answers) -> None:
        for tool in ("pay", "ask_model", "folders"):
            assert (await client.call_tool(tool, {})).is_error

    host(talk, is_able=False)


def test_the_caller_the_state_and_errors(host: Any) -> None:
    async def talk(client: Client, answers: Answers) -> None:
        result = (await client.call_tool("caller", {})).structured_content
        assert result is not None
        assert result["client"] == "mcp"
        assert (result["revision"], result["elicits"]) == ("2025-11-25", True)
        assert result["is_anonymous"] is (result["issuer"] != "os")
        assert result["tea"] == 250
        assert text_of(await client.call_tool("fail", {"how": "told"})) == "Closed today."
        masked = text_of(await client.call_tool("fail", {"how": "other"}))
        assert masked.startswith("fail failed: ")
        assert "secret" not in masked
        hung = await client.call_tool("hang", {})
        assert hung.is_error
        assert text_of(hung) == "hang was stopped: it ran for longer than 0.2 s"

    host(talk)


def test_a_notification_reaches_all_hosts(host: Any) -> None:
    async def talk(client: Client, answers: Answers) -> None:
        while answers.told.empty():  # over HTTP its standing stream may not be open yet
            await client.call_tool("announce", {})
        told = await answers.next_told(types.ResourceUpdatedNotification)
        assert str(told.params.uri) == "acme://news"

    host(talk)


class Search(types.Request[dict[str, Any], Literal["acme/search"]]):
    method: Literal["acme/search"] = "acme/search"


class Found(types.Result):
    found: list[str]
    state: dict[str, int]


def test_a_request_of_the_authors_own(host: Any) -> None:
    async def talk(client: Client, answers: Answers) -> None:
        search = Search(params={"words": ["a", "b"]})
        found = await client.session.send_request(search, Found)
        assert (found.found, found.state) == (["a", "b"], {"tea": 250})
        with pytest.raises(MCPError, match="Closed today"):
            await client.session.send_request(Search(params={"words": []}), Found)

    host(talk)


@pytest.mark.needs_one_process("such a tool is that of one replica")
def test_tools_come_and_go(host: Any) -> None:
    async def talk(client: Client, answers: Answers) -> None:
        assert client.server_capabilities.tools is not None
        assert client.server_capabilities.tools.list_changed
        await client.call_tool("learn", {})
        await answers.next_told(types.ToolListChangedNotification)
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert "learned" in names
        assert text_of(await client.call_tool("learned", {})) == "new"
        await client.call_tool("forget", {})
        await answers.next_told(types.ToolListChangedNotification)
        with pytest.raises(MCPError, match="learned"):
            await client.call_tool("learned", {})

    host(talk)
