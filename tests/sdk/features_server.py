"""Resources, prompts and completions for the official clients."""

from typing import Annotated, Literal

import msgspec

from streams import AssistantMessage, Call, ResourceNotFound, Server, UserMessage

server = Server("features", version="1.0", page_size=2, resume_min_s=0.1)
reports = {1: "one", 2: "two"}


@server.resource("reports://{id}", mime_type="text/plain")
async def report(call: Call, id: int) -> str:
    """One report."""
    await call.log("info", f"reading {id}")
    if id not in reports:
        raise ResourceNotFound(f"There is no report {id}.")
    return reports[id]


@server.resource("logo://small", mime_type="image/png", size=4)
def logo() -> bytes:
    """The logo."""
    return b"\x89PNG"


@server.resource("config://app")
def config() -> dict[str, int]:
    """The settings."""
    return {"rows": 3}


@server.resource("config://user")
def user() -> dict[str, int]:
    """The settings of the user."""
    return {"rows": 4}


@server.tool
async def change(id: int, text: str) -> str:
    """Change a report, and tell of it."""
    reports[id] = text
    await server.resource_updated(f"reports://{id}")
    return "changed"


@server.tool
async def grow(name: str) -> str:
    """Add a resource while clients are connected."""

    @server.resource(f"new://{name}", name=name)
    def new() -> str:
        return name

    return "grown"


@server.prompt(title="Summarize")
def summarize(
    id: Annotated[int, msgspec.Meta(description="The report.")],
    style: Literal["long", "short"] = "short",
) -> list[UserMessage | AssistantMessage]:
    """Summarize a report."""
    return [UserMessage(f"Summarize {reports[id]}, {style}."), AssistantMessage("Gladly.")]


@server.completion("summarize", "id")
async def ids(value: str, arguments: dict[str, str]) -> list[str]:
    style = arguments.get("style", "")
    return [f"{each}{style}" for each in reports if str(each).startswith(value)]
