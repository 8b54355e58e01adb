"""URI templates: which values a URI has, and which URIs are dangerous."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.shared.uri_template import UriTemplate as OfficialTemplate

from streams.server.templates import URI_LETTERS_MAX, UnsafeValue, UriTemplate, check_uri


@pytest.mark.parametrize(
    ("template", "uri", "values"),
    [
        ("reports://{id}", "reports://7", {"id": "7"}),
        ("reports://{id}", "reports://a%20b%2Fc", {"id": "a b/c"}),
        ("reports://{id}", "reports://%252e%252e", {"id": "%2e%2e"}),
        ("reports://{id}", "reports://größe", {"id": "größe"}),
        ("reports://{id}", "reports://", None),
        ("reports://{id}", "reports://a/b", None),
        ("reports://{id}", "reports://a?b", None),
        ("reports://{id}", "reports://a#b", None),
        ("reports://{id}", "Reports://a", None),
        ("reports://{id}", "reports://%zz", None),
        ("reports://{id}", "reports://%ff", None),
        ("reports://{id}", "reports://%", None),
        ("reports://{id}", "reports://a b", None),
        ("reports://{id}", "reports://a\n", None),
        ("reports://{id}", "reports://" + "a" * URI_LETTERS_MAX, None),
        ("files:///{+path}", "files:///a/b.txt", {"path": "a/b.txt"}),
        ("files:///{+path}", "files:///a..b/c", {"path": "a..b/c"}),
        ("files:///{path*}", "files:///a/b%2Fc", {"path": ["a", "b/c"]}),
        ("files://host{/path*}", "files://host/a/b", {"path": ["a", "b"]}),
        ("x:{+path}/raw", "x:a/b/raw", {"path": "a/b"}),
        ("x:{+path}/raw", "x:raw", None),
        ("x:{a}/of/{+path}/at/{b}", "x:1/of/2/at/3/at/4", {"a": "1", "path": "2/at/3", "b": "4"}),
        ("x:{a}-{b}", "x:1-2-3", {"a": "1-2", "b": "3"}),
        ("x:{a,b}", "x:1,2", {"a": "1", "b": "2"}),
        ("x:{name}{.type}", "x:a.json", {"name": "a", "type": "json"}),
        ("x:{a}{;v}", "x:1;v=2", {"a": "1", "v": "2"}),
        ("x:{a}{#part}", "x:1#two/three", {"a": "1", "part": "two/three"}),
        ("x:{a}{?q,lang}", "x:1?lang=de&q=a%20b&other=1", {"a": "1", "q": "a b", "lang": "de"}),
        ("x:{a}{?q}{&r}", "x:1?r=2", {"a": "1", "r": "2"}),
        ("x:{a}{?q}", "x:1?q=1&q=2", {"a": "1", "q": "1"}),
        ("x:{a}{?q}", "x:1?q=%ff", None),
        ("x:{a}{?q}", "x:1", {"a": "1"}),
    ],
)
def test_a_uri_has_these_values(template: str, uri: str, values: dict[str, Any] | None) -> None:
    assert UriTemplate(template).match(uri) == values


@pytest.mark.parametrize(
    "value",
    [
        "..",
        "%2e%2e",
        "%2E.",
        "a%2F..%2Fb",
        "..%5Cb",
        "%2Fetc%2Fpasswd",
        "%5Cserver",
        "%5C%5Cserver%5Cshare",
        "C:",
        "c:%5Cwindows",
        "a%00",
        "%00",
        "%5B%22..%22%2C%22etc%22%5D",  # JSON, for a parameter that is a list
        "%5B%22%5Cu002e%5Cu002e%22%5D",
        "%7B%22a%22%3A%5B%22%2Fetc%22%5D%7D",
    ],
)
@pytest.mark.parametrize("template", ["x://{v}", "x://{+v}", "x://{v*}", "x://y{?v}"])
def test_a_value_cannot_lead_out_of_a_folder(template: str, value: str) -> None:
    uri = f"x://y?v={value}" if "?" in template else f"x://{value}"
    with pytest.raises(UnsafeValue, match=r"^v: "):
        UriTemplate(template).match(uri)


@pytest.mark.parametrize("path", ["/etc/passwd", "a/../../b", "../b", "a/.."])
def test_a_path_cannot_lead_out_of_its_folder(path: str) -> None:
    for template in ("x://{+path}", "x://{path*}"):
        with pytest.raises(UnsafeValue):
            UriTemplate(template).match(f"x://{path}")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("x:{a}{b}", "put something between a and b"),
        ("x:{a}{+b}", "put something between a and b"),
        ("x:{+a}/{b*}", "only one of a, b can have slashes"),
        ("x:{a}/{a}", "each name can be in it once"),
        ("x:{a:3}", "cannot be matched"),
        ("x:{a.b}", "cannot be the name of a parameter"),
        ("x:{}", "cannot be the name of a parameter"),
        ("x:{?q}/b", "must come last"),
        ("x:{.a*}", "can be matched"),
        ("x:{a", "expected something like"),
        ("x:a}", "expected something like"),
        ("x:{{a}}", "expected something like"),
        ("no-scheme/{a}", "expected something like"),
        ("x: {a}", "expected something like"),
        ("x:{a}" + "b" * URI_LETTERS_MAX, "characters"),
    ],
)
def test_what_cannot_be_matched_is_refused_in_the_template(template: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        UriTemplate(template)


@pytest.mark.parametrize("uri", ["", "x", "x y:z", "x:a b", "1x:a", "x:{a}", "x:" + "a" * 9_000])
def test_what_is_no_uri_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="URI"):
        check_uri(uri)


_PIECES = st.sampled_from(
    ["/", "a", "b", "-", "?", "q=", "&", ";v=", ",", "z", "%2F", ".", "c", "#"]
)


@pytest.mark.parametrize(
    "template",
    [
        "x://{a}",
        "x://{a}/{b}",
        "x://{a}-{b}/c",
        "x://{+p}",
        "x://{a}/{+p}/z",
        "x:{/p*}",
        "x://{a}{.b}",
        "x://{a}{?q,r}",
        "x://{a};k{;v}",
        "x://{a,b}",
    ],
)
@given(tail=st.lists(_PIECES, max_size=9).map("".join))
def test_a_match_is_that_of_the_official_sdk_except_for_empty_values(
    template: str, tail: str
) -> None:
    for uri in (f"x:{tail}", f"x://{tail}"):
        expected = OfficialTemplate.parse(template).match(uri)
        path = [value for name, value in (expected or {}).items() if name not in {"q", "r"}]
        if any(not value or "" in list(value) for value in path):
            continue
        try:
            assert UriTemplate(template).match(uri) == expected
        except UnsafeValue:
            continue


def test_no_uri_takes_long() -> None:
    """A scan that went back would need some 10^12 steps for these."""
    template = UriTemplate("x:" + "/".join(f"{{a{n}}}-{{b{n}}}" for n in range(8)))
    assert template.match("x:" + "-" * (URI_LETTERS_MAX - 2)) is None
    assert template.match("x:" + "-/" * ((URI_LETTERS_MAX - 2) // 2)) is None
