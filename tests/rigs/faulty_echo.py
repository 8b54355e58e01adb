"""Servers whose `echo` and `note` make one mistake each, for the test of the benchmarks."""

from streams import Call, Server

stale = Server("stale", resume_min_s=0)
failing = Server("failing", resume_min_s=0)
mute = Server("mute", resume_min_s=0)


class _Last:
    text = "0"


@stale.tool(name="echo")
async def echo_the_last(text: str) -> str:
    """Return the text of the call before."""
    said, _Last.text = _Last.text, text
    return said


@failing.tool(name="echo")
async def echo_an_error(text: str) -> str:
    """Fail with the text."""
    raise ValueError(text)


@mute.tool(name="note")
async def note_nothing(call: Call, text: str) -> str:
    """Send no log message."""
    return text
