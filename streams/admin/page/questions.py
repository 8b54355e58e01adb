"""Open questions of a call: shown to all operators, with a form where they may answer.

The fields of an elicitation's form are those of its schema. Other requests are answered with JSON,
and so are elicitations with a schema that MCP does not allow: a wrapped server may send any.
"""

from typing import Any, Final

import msgspec

from streams.admin.page.html import Markup, join, tag
from streams.admin.page.messages import pretty
from streams.exchange import HttpError
from streams.observe.registry import OpenQuestion

FIELDS_MAX: Final = 50  # of one question
OPTIONS_MAX: Final = 200  # of one field
LETTERS_MAX: Final = 10_000  # of one answer
PARAMS_LETTERS_MAX: Final = 4_000  # of a question that is shown as JSON
ELICITATION: Final = "elicitation/create"
PREFIX: Final = "field "  # of the names of fields, which a schema chooses
_SIMPLE: Final = ("string", "number", "integer", "boolean")


def shown(question: OpenQuestion, form: Markup | None) -> Markup:
    """A question, and the form for its answer.

    It never changes: htmx leaves the element as it is, with what an operator has written in it.
    """
    params = _params(question)
    message = params.get("message")
    if isinstance(message, str):
        told = tag("p", tag("bdi", message[:LETTERS_MAX]))
    else:
        text, _ = pretty(bytes(question.params))
        told = tag("pre", text[:PARAMS_LETTERS_MAX])
    heading = tag("h3", f"{question.method}, message {question.seq}", class_="asks")
    id_ = f"question-{question.seq}"
    return tag("section", heading, told, form, class_="question", id=id_, hx_preserve=True)


def form(question: OpenQuestion, action: str, hidden: Markup) -> Markup:
    """The form for the answer."""
    fields = fields_of(question)
    if fields is None:
        controls = join(
            [
                tag(
                    "label",
                    tag("span", "Result, as JSON"),
                    tag("textarea", name="result", required=True, id=f"result-{question.seq}"),
                ),
                tag("div", _button("answer", "Answer", class_="first")),
            ]
        )
    else:
        controls = join(
            [
                *(_field(name, about, question.seq, at) for at, (name, about) in enumerate(fields)),
                tag(
                    "div",
                    _button("accept", "Accept", class_="first"),
                    _button("decline", "Decline", formnovalidate=True),
                    _button("cancel", "Dismiss", formnovalidate=True),
                ),
            ]
        )
    return tag("form", hidden, controls, method="post", action=action)


def fields_of(question: OpenQuestion) -> list[tuple[str, dict[str, Any]]] | None:
    """The fields that the form of an elicitation wants; None if it is to be answered with JSON."""
    params = _params(question)
    if question.method != ELICITATION or params.get("mode", "form") not in ("form", "url"):
        return None
    schema = params.get("requestedSchema", {})
    properties = schema.get("properties", {}) if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or len(properties) > FIELDS_MAX:
        return None
    if not all(map(_is_simple, properties.values())):
        return None
    required = schema.get("required")
    wanted = required if isinstance(required, list) else ()
    return [(name, {**about, "is_wanted": name in wanted}) for name, about in properties.items()]


def _is_simple(about: Any) -> bool:
    """Whether a field with this schema can be drawn."""
    return isinstance(about, dict) and about.get("type") in _SIMPLE


def answer_of(question: OpenQuestion, given: dict[str, str]) -> dict[str, Any]:
    """The result that a form has for a question. Raises `HttpError`."""
    action = given.get("action", "")
    fields = fields_of(question)
    if fields is None:
        try:
            result = msgspec.json.decode(given.get("result", ""))
        except (ValueError, RecursionError) as error:
            raise HttpError(400, f"The result is no JSON: {error}.") from None
        if not isinstance(result, dict):
            raise HttpError(400, "The result is no JSON object: write {…}.")
        return result
    if action not in ("accept", "decline", "cancel"):
        raise HttpError(400, "Accept, decline or dismiss the question.")
    if action != "accept":
        return {"action": action}
    content: dict[str, Any] = {}
    for name, about in fields:
        text = given.get(f"{PREFIX}{name}", "")
        if about["type"] == "boolean":
            content[name] = text == "on"
        elif text or about["is_wanted"]:
            content[name] = _value(name, about["type"], text)
    return {"action": action, "content": content}


def _value(name: str, type_: str, text: str) -> str | int | float:
    if type_ == "string":
        return text[:LETTERS_MAX]
    try:
        return int(text) if type_ == "integer" else float(text)
    except ValueError:
        raise HttpError(400, f"{name}: write a number.") from None


def _field(name: str, about: dict[str, Any], number: int, at: int) -> Markup:
    title = about.get("title") if isinstance(about.get("title"), str) else name
    label = tag("span", tag("bdi", title))
    attributes: dict[str, Any] = {"name": f"{PREFIX}{name}", "id": f"field-{number}-{at}"}
    wanted = bool(about["is_wanted"])
    default = about.get("default")
    choices = _choices(about)
    if about["type"] == "boolean":
        box = tag("input", type="checkbox", checked=default is True, **attributes)
        return tag("label", box, label, class_="inline")
    if choices:
        options = [
            tag("option", each, value=each, selected=each == default)
            for each in choices[:OPTIONS_MAX]
        ]
        if not wanted:
            options.insert(0, tag("option", "", value=""))
        return tag("label", label, tag("select", *options, required=wanted, **attributes))
    if isinstance(default, str | int | float) and not isinstance(default, bool):
        attributes["value"] = default
    is_number = about["type"] != "string"
    return tag(
        "label",
        label,
        tag(
            "input",
            type="number" if is_number else "text",
            step=("1" if about["type"] == "integer" else "any") if is_number else None,
            maxlength=None if is_number else LETTERS_MAX,
            required=wanted,
            autocomplete="off",
            **attributes,
        ),
    )


def _choices(about: dict[str, Any]) -> list[str]:
    """The texts of which one is chosen; none where the field is written."""
    choices = about.get("enum")
    if about["type"] != "string" or not isinstance(choices, list):
        return []
    return [each for each in choices if isinstance(each, str)]


def _button(value: str, name: str, **attributes: Any) -> Markup:
    return tag("button", name, name="action", value=value, **attributes)


def _params(question: OpenQuestion) -> dict[str, Any]:
    try:
        params = msgspec.json.decode(question.params)
    except (ValueError, RecursionError):
        return {}
    return params if isinstance(params, dict) else {}
