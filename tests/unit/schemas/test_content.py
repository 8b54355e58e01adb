"""Content blocks: what goes over the wire is what MCP's own models read."""

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcp_types import _v2025_11_25 as mcp

from streams.schemas.content import (
    Annotations,
    Audio,
    Block,
    EmbeddedResource,
    Icon,
    Image,
    ResourceContents,
    ResourceLink,
    Text,
)

# No test depends on the speed of the machine.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

MODELS: dict[str, Any] = {
    "text": mcp.TextContent,
    "image": mcp.ImageContent,
    "audio": mcp.AudioContent,
    "resource": mcp.EmbeddedResource,
    "resource_link": mcp.ResourceLink,
}

words = st.text(max_size=20)
maybe_words = st.none() | words
metas = st.none() | st.dictionaries(words, words | st.integers(-9, 9), max_size=3)
annotations = st.none() | st.builds(
    Annotations,
    audience=st.none() | st.lists(st.sampled_from(["user", "assistant"])).map(tuple),
    priority=st.none() | st.floats(0, 1),
    last_modified=st.none() | st.just("2025-01-12T15:00:58Z"),
)
icons = st.builds(
    Icon,
    words,
    mime_type=maybe_words,
    sizes=st.none() | st.lists(st.sampled_from(["48x48", "any"])).map(tuple),
    theme=st.none() | st.sampled_from(["light", "dark"]),
)
contents = st.builds(
    ResourceContents, words, text=words, mime_type=maybe_words, meta=metas
) | st.builds(ResourceContents, words, blob=st.binary(), mime_type=maybe_words, meta=metas)
common: dict[str, Any] = {"annotations": annotations, "meta": metas}
blocks = st.one_of(
    st.builds(Text, words, **common),
    st.builds(Image, st.binary(), words, **common),
    st.builds(Audio, st.binary(), words, **common),
    st.builds(EmbeddedResource, contents, **common),
    st.builds(
        ResourceLink,
        words,
        words,
        title=maybe_words,
        description=maybe_words,
        mime_type=maybe_words,
        size=st.none() | st.integers(0, 2**40),
        icons=st.none() | st.lists(icons, max_size=2).map(tuple),
        **common,
    ),
)


@patient
@given(blocks)
def test_mcps_own_models_read_every_block_and_lose_nothing_of_it(block: Block) -> None:
    wire = msgspec.json.decode(msgspec.json.encode(block))
    read = MODELS[wire["type"]].model_validate(wire)
    # MCP's models ignore unknown fields, so a misspelled field would be missing in what they read.
    assert read.model_dump(by_alias=True, exclude_none=True, mode="json") == wire


@patient
@given(blocks)
def test_a_block_read_from_its_json_is_the_same_block(block: Block) -> None:
    assert msgspec.json.decode(msgspec.json.encode(block), type=Block) == block


@pytest.mark.parametrize(
    ("block", "wire"),
    [
        (Text("hi"), b'{"type":"text","text":"hi"}'),
        (
            Image(b"\x00\xff\xfe", "image/png"),
            b'{"type":"image","data":"AP/+","mimeType":"image/png"}',
        ),
        (Audio(b"a", "audio/wav"), b'{"type":"audio","data":"YQ==","mimeType":"audio/wav"}'),
        (
            EmbeddedResource.of("file:///a", text="", mime_type="text/plain"),
            b'{"type":"resource","resource":{"uri":"file:///a","text":"","mimeType":"text/plain"}}',
        ),
        (
            EmbeddedResource.of("file:///a", blob=b"a", meta={"k": 1}),
            b'{"type":"resource","resource":{"uri":"file:///a","blob":"YQ=="},"_meta":{"k":1}}',
        ),
        (
            ResourceLink("file:///a", "a", annotations=Annotations(last_modified="2025")),
            b'{"type":"resource_link","uri":"file:///a","name":"a",'
            b'"annotations":{"lastModified":"2025"}}',
        ),
    ],
)
def test_a_block_has_exactly_the_wires_fields_and_no_nulls(block: Block, wire: bytes) -> None:
    assert msgspec.json.encode(block) == wire


def test_a_block_may_stand_inside_the_params_of_a_request() -> None:
    message = {"role": "user", "content": EmbeddedResource.of("file:///a", text="x")}
    read = mcp.SamplingMessage.model_validate(
        {"role": "user", "content": msgspec.json.decode(msgspec.json.encode(Text("x")))}
    )
    assert isinstance(read.content, mcp.TextContent)
    assert b'"resource":{"uri":"file:///a","text":"x"}' in msgspec.json.encode(message)


@pytest.mark.parametrize("fields", [{}, {"text": "a", "blob": b"a"}])
def test_a_resource_has_text_or_a_blob_not_both_and_not_neither(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        EmbeddedResource.of("file:///a", **fields)


@pytest.mark.parametrize("make", [Image, Audio])
def test_base64_given_for_bytes_is_refused(make: Any) -> None:
    with pytest.raises(TypeError, match="data: expected bytes, got str"):
        make("YQ==", "image/png")


def test_bytes_given_for_text_are_refused() -> None:
    not_text: Any = b"a"
    with pytest.raises(TypeError, match="text: expected str, got bytes"):
        Text(not_text)


@pytest.mark.parametrize("priority", [-0.1, 1.1, float("nan")])
def test_a_priority_lies_between_0_and_1(priority: float) -> None:
    with pytest.raises(ValueError, match="expected 0 to 1"):
        Annotations(priority=priority)
