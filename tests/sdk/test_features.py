"""Resources, prompts and completions, as the official Python SDK's client sees them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from mcp import Client, MCPError, types
from mcp.client.stdio import StdioServerParameters

from tests.wire.process import CLI, ServerProcess

APP: Final = f"{Path(__file__).parent / 'features_server.py'}:server"
PATIENCE_S: Final = 60
NOT_FOUND: Final = -32002

# The SDK warns of a method that a later revision does not have.
pytestmark = pytest.mark.filterwarnings("ignore:resources/subscribe is removed")


class Hearing:
    """The notifications that a client has received."""

    def __init__(self) -> None:
        self.uris: list[str] = []
        self.changes = 0
        self._heard = asyncio.Condition()

    async def __call__(self, message: Any) -> None:
        async with self._heard:
            if isinstance(message, types.ResourceUpdatedNotification):
                self.uris.append(str(message.params.uri))
            elif isinstance(message, types.ResourceListChangedNotification):
                self.changes += 1
            self._heard.notify_all()

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with self._heard:
            await self._heard.wait_for(is_so)


class Cable:
    """A connection to a port of this machine that the test cuts."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    @contextlib.asynccontextmanager
    async def laid(self) -> AsyncIterator["Cable"]:
        async with await asyncio.start_server(self._connect, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield self
            self.cut()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._upstream)
        ends = {writer, back}
        self._writers |= ends
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(self._pass(reader, back), self._pass(there, writer))
        for each in ends:
            each.transport.abort()
        self._writers -= ends

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(64 * 1024):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, app=APP) as server:
        yield server


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}/mcp"


Talk = Callable[[Client, Hearing], Awaitable[None]]


@pytest.fixture(params=["stdio", "http"])
def talking(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[Talk], None]]:
    """Run a conversation of the official client."""
    with contextlib.ExitStack() as stack:
        if request.param == "http":
            process = stack.enter_context(ServerProcess(tmp_path, app=APP))
            target: Any = url(process.http_port)
        else:
            target = StdioServerParameters(command=CLI[0], args=[*CLI[1:], "serve", APP, "--stdio"])

        def run(talk: Talk) -> None:
            async def main() -> None:
                hearing = Hearing()
                async with (
                    asyncio.timeout(PATIENCE_S),
                    Client(target, message_handler=hearing) as client,
                ):
                    await talk(client, hearing)

            asyncio.run(main())

        yield run


def text_of(result: types.ReadResourceResult) -> str:
    (content,) = result.contents
    assert isinstance(content, types.TextResourceContents)
    return content.text


def test_resources_are_listed_and_read(talking: Callable[[Talk], None]) -> None:
    async def talk(client: Client, hearing: Hearing) -> None:
        assert client.server_capabilities.resources is not None
        assert client.server_capabilities.resources.subscribe
        first = await client.list_resources()
        second = await client.list_resources(cursor=first.next_cursor)
        found = [str(each.uri) for page in (first, second) for each in page.resources]
        assert found == ["logo://small", "config://app", "config://user"]
        assert (first.resources[0].mime_type, first.resources[0].size) == ("image/png", 4)
        assert second.next_cursor is None
        (template,) = (await client.list_resource_templates()).resource_templates
        assert (template.uri_template, template.description) == ("reports://{id}", "One report.")
        assert text_of(await client.read_resource("reports://1")) == "one"
        assert text_of(await client.read_resource("config://app")) == '{"rows":3}'
        (blob,) = (await client.read_resource("logo://small")).contents
        assert isinstance(blob, types.BlobResourceContents)
        assert blob.blob == "iVBORw=="
        for uri, code in (("reports://7", NOT_FOUND), ("x:y", NOT_FOUND), ("reports://a", -32602)):
            with pytest.raises(MCPError) as error:
                await client.read_resource(uri)
            assert error.value.code == code

    talking(talk)


def test_prompts_are_listed_got_and_completed(talking: Callable[[Talk], None]) -> None:
    async def talk(client: Client, hearing: Hearing) -> None:
        (prompt,) = (await client.list_prompts()).prompts
        assert (prompt.name, prompt.title) == ("summarize", "Summarize")
        assert prompt.arguments is not None
        assert [(each.name, each.description, each.required) for each in prompt.arguments] == [
            ("id", "The report.", True),
            ("style", None, False),
        ]
        got = await client.get_prompt("summarize", {"id": "1", "style": "long"})
        assert got.description == "Summarize a report."
        assert [(each.role, each.content.text) for each in got.messages] == [  # type: ignore[union-attr]
            ("user", "Summarize one, long."),
            ("assistant", "Gladly."),
        ]
        with pytest.raises(MCPError, match="id: missing"):
            await client.get_prompt("summarize", {})
        ref = types.PromptReference(type="ref/prompt", name="summarize")
        found = await client.complete(ref, {"name": "style", "value": "l"})
        assert found.completion.values == ["long"]
        given = {"name": "id", "value": "1"}
        found = await client.complete(ref, given, context_arguments={"style": "!"})
        assert (found.completion.values, found.completion.total) == (["1!"], 1)

    talking(talk)


@pytest.mark.needs_one_process("the new resource is that of one replica", over="http")
def test_a_subscriber_hears_of_changes(talking: Callable[[Talk], None]) -> None:
    async def talk(client: Client, hearing: Hearing) -> None:
        await client.subscribe_resource("reports://1")
        await client.call_tool("change", {"id": 2, "text": "unheard"})
        await client.call_tool("change", {"id": 1, "text": "new"})
        await hearing.until(lambda: bool(hearing.uris))
        assert hearing.uris == ["reports://1"]
        await client.call_tool("grow", {"name": "leaf"})
        await hearing.until(lambda: hearing.changes > 0)
        assert text_of(await client.read_resource("new://leaf")) == "leaf"

    talking(talk)


def heard_by_one_that_is_cut_off(server: ServerProcess) -> list[str]:
    async def main() -> list[str]:
        hearing = Hearing()
        async with (
            asyncio.timeout(PATIENCE_S),
            Cable(server.http_port).laid() as cable,
            Client(url(cable.port), message_handler=hearing) as client,
            Client(url(server.http_port)) as other,
        ):
            for each in (1, 2):
                await client.subscribe_resource(f"reports://{each}")
            await other.call_tool("change", {"id": 1, "text": "first"})
            await hearing.until(lambda: bool(hearing.uris))
            cable.cut()
            for text in ("second", "third"):
                await other.call_tool("change", {"id": 2, "text": text})
            await hearing.until(lambda: "reports://2" in hearing.uris)
            return hearing.uris

    return asyncio.run(main())


def test_a_client_that_is_cut_off_hears_of_changes_later(server: ServerProcess) -> None:
    assert set(heard_by_one_that_is_cut_off(server)) == {"reports://1", "reports://2"}


@pytest.mark.needs_one_process("another replica tells it that both may have changed")
def test_a_client_that_is_cut_off_hears_of_each_change_once(server: ServerProcess) -> None:
    assert heard_by_one_that_is_cut_off(server) == ["reports://1", "reports://2"]
