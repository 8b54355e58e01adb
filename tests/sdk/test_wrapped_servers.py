"""Other people's servers behind `mcp-streams wrap`: clients cannot tell them from bare ones."""

import pytest

from tests.sdk import transcripts
from tests.sdk.stock import Node
from tests.sdk.transcripts import Conversation, Json

CLIENTS = ("python", "typescript")
SERVERS = ("everything", "memory", "filesystem", "sdk", "lowlevel")

pytestmark = pytest.mark.timeout(300, func_only=True)


@pytest.fixture(scope="module")
def conversations(node: Node, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Conversation]:
    folder = tmp_path_factory.mktemp("servers")
    made = (
        transcripts.everything(node),
        transcripts.memory(node, folder),
        transcripts.filesystem(node, folder / "files"),
        transcripts.sdk_server(),
        transcripts.lowlevel(),
    )
    return {each.name: each for each in made}


@pytest.fixture(scope="module")
def bare(node: Node, conversations: dict[str, Conversation]) -> dict[tuple[str, str], Json]:
    """The transcripts of the bare servers."""
    held = {}
    for client in CLIENTS:
        for name, conversation in conversations.items():
            held[client, name] = hold(client, node, conversation)
    return held


def hold(client: str, node: Node, conversation: Conversation) -> Json:
    conversation.prepare()
    where = {"command": conversation.command, "environment": dict(conversation.environment)}
    return transcripts.hold(client, node, conversation, where)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_bare_conversation_repeats(
    client: str,
    server: str,
    node: Node,
    bare: dict[tuple[str, str], Json],
    conversations: dict[str, Conversation],
) -> None:
    assert hold(client, node, conversations[server]) == bare[client, server]
