"""Pydantic's errors in words that a user can act on: the field, what would be right, and what was given."""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_Path = tuple[int | str, ...]
_WORDS = {
    "int_type": "should be a whole number",
    "float_type": "should be a number",
    "finite_number": "should be a finite number",
    "bool_type": "should be true or false",
    "string_type": "should be text",
    "list_type": "should be a list",
    "tuple_type": "should be a list",
    "dict_type": "should be a mapping",
    "model_type": "should be a mapping of fields to values",
    "model_attributes_type": "should be a mapping of fields to values",
    "greater_than": "should be more than {gt:.12g}",
    "greater_than_equal": "should be {ge:.12g} or more",
    "less_than": "should be less than {lt:.12g}",
    "less_than_equal": "should be {le:.12g} or less",
    "too_short": "should have {min_length} or more items",
    "too_long": "should have {max_length} or fewer items",
    "literal_error": "should be {expected}",
    "enum": "should be {expected}",
    "string_pattern_mismatch": "should have the form {pattern}",
    "timezone_aware": "should be a time with its zone, such as 2031-05-01T12:00:00Z",
}
"""Pydantic's name of an error -> the message, with places for what is in the error's context."""
# The lax and the strict parser name the same mistake differently.
_WORDS |= {"int_parsing": _WORDS["int_type"], "int_from_float": _WORDS["int_type"]}
_WORDS |= dict.fromkeys(("datetime_parsing", "datetime_type", "datetime_from_date_parsing"), _WORDS["timezone_aware"])
_WORDS |= {"float_parsing": _WORDS["float_type"], "bool_parsing": _WORDS["bool_type"]}


def explain(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """A line for each field, as `where.field: what would be right, got what was given`."""
    findings: dict[str, list[ErrorDetails]] = {}
    for finding in error.errors():
        findings.setdefault(".".join(filter(None, [where, *_written(model, finding["loc"])])), []).append(finding)
    lines = []
    listed: set[_Path] = set()  # sections whose fields have been listed: once is enough
    for path, found in findings.items():
        # For a union, pydantic gives an error for each of its types; the first is the most likely one.
        section = found[0]["loc"][:-1]
        lines.append(f"{path}{_line(found, model, lists=section not in listed)}")
        if found[0]["type"] == "extra_forbidden":
            listed.add(section)
    return "\n".join(lines)


def unknown(name: str, known: set[str], what: str = "field", *, lists: bool = True) -> str:
    """The message for a field that is not in `known`, which it lists; it ends with the nearest known name."""
    nearest = difflib.get_close_matches(name, sorted(known), n=1)
    parts = [f"unknown {what}"]
    parts += [f"known: {', '.join(sorted(known))}"] if known and lists else []
    parts += [f"did you mean {nearest[0]}?"] if nearest else []
    return "; ".join(parts)


def unknown_keys(model: type[BaseModel], given: Any, where: str, path: _Path = ()) -> Iterator[str]:
    """A line for each key of a part of a section that the section does not have, at any depth.

    Args:
        model: the section.
        given: the part, which may lack required keys.
        where: its place in the user's file.
        path: place in the section of what `given` is a part of.
    """
    known = _fields_at(model, path)
    for key, value in given.items() if known and isinstance(given, Mapping) else ():
        if key in known:
            yield from unknown_keys(model, value, f"{where}.{key}", (*path, key))
        else:
            yield f"{where}.{key}: {unknown(str(key), known)}"


def shown(value: Any) -> str:
    """A value as YAML writes it, so that the user finds it in the file."""
    return {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))


def excerpt(value: Any) -> str:
    """The first 80 characters of a value as `shown` gives it, for one that may be long."""
    return shown(value)[:80]


def _line(found: Sequence[ErrorDetails], model: type[BaseModel], *, lists: bool) -> str:
    """The message that follows the field's path, from the errors there; it lists the fields that there are if one is
    unknown and `lists`."""
    finding = found[0]
    kind, location, context = finding["type"], finding["loc"], finding.get("ctx", {})
    if kind == "extra_forbidden":
        return f": {unknown(str(location[-1]), _fields_at(model, location[:-1]), lists=lists)}"
    if kind == "missing":
        return ": required"
    if kind == "union_tag_not_found":
        return f".{_unquoted(context['discriminator'])}: required"
    if kind == "union_tag_invalid":
        return f".{_unquoted(context['discriminator'])}: should be one of {context['expected_tags']}, " + (
            f"got {context['tag']!r}"
        )
    words = _WORDS[kind].format(**context) if kind in _WORDS else finding["msg"].removeprefix("Value error, ")
    if kind == "literal_error":
        others = [_WORDS[each["type"]].format(**each.get("ctx", {})) for each in found[1:] if each["type"] in _WORDS]
        words = ", or ".join([words, *(each.removeprefix("should be ") for each in others)])
    # An error about a whole section, or a list of sections, does not repeat the section.
    whole = finding["input"][0] if isinstance(finding["input"], list) and finding["input"] else finding["input"]
    given = "" if isinstance(whole, dict) else f", got {shown(finding['input'])}"
    return f": {words}{given}{_hint(kind, finding['input'])}"


def _hint(kind: str, value: Any) -> str:
    """Advice on how to write the value that was probably meant."""
    if kind == "string_type" and isinstance(value, int | float):
        return f'; put it in quotes: "{str(value).lower() if isinstance(value, bool) else value}"'
    if kind not in ("int_type", "float_type") or not isinstance(value, str):
        return ""
    try:
        number = float(value)
    except ValueError:
        return ""
    if not math.isfinite(number):
        return ""
    if kind == "int_type":
        return f", which is text; write {int(number)}" if number.is_integer() else ""
    mantissa, e, exponent = value.lower().partition("e")
    if not e:
        return f", which is text; write {value} without quotes"
    # YAML 1.1 wants a point in the mantissa and a sign before the exponent.
    point = mantissa if "." in mantissa else f"{mantissa}.0"
    sign = exponent if exponent[0] in "+-" else f"+{exponent}"
    return f", which YAML reads as text; write {point}e{sign}"


def _unquoted(text: str) -> str:
    return text.strip("'()")  # a function that finds the kind is named with its brackets


def _written(model: type[BaseModel], path: _Path) -> list[str]:
    """`path` as it stands in the file: pydantic also names the variant that a section's `kind` chose, or the type."""
    kinds = [model, *(_kind_at(model, path[:end]) for end in range(1, len(path)))]
    named = zip(path, kinds, strict=False)
    return [str(part) for part, kind in named if part != "[key]" and not _is_union(kind)]


def _fields_at(model: type[BaseModel], path: _Path) -> set[str]:
    """Names of the fields of the section at `path`; empty if `path` does not lead to a section."""
    kind = _kind_at(model, path)
    return set(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else set()


def _kind_at(kind: Any, path: _Path) -> Any:
    """The type of the value at `path` below `kind`, or None if it is not known."""
    for part in path:
        if variant := _variant(kind, part):
            kind = variant
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields.get(str(part))
            kind = field.annotation if field else None
        else:
            kind = get_args(kind)[-1] if get_origin(kind) in (list, dict) else None
        kind = _certain(kind)
    return kind


def _certain(kind: Any) -> Any:
    """The type without its annotations, and without null as the other choice."""
    if get_origin(kind) is Annotated:
        return _certain(get_args(kind)[0])
    if _is_union(kind) and len(certain := [choice for choice in get_args(kind) if choice is not NoneType]) == 1:
        return _certain(certain[0])
    return kind


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def _variant(kind: Any, tag: int | str) -> type[BaseModel] | None:
    """The section of the union `kind` whose discriminator has the value `tag`."""
    sections = get_args(kind) if _is_union(kind) else ()
    for section in (get_args(each)[0] if get_origin(each) is Annotated else each for each in sections):
        fields = section.model_fields.values() if isinstance(section, type) and issubclass(section, BaseModel) else ()
        if any(tag in get_args(field.annotation) for field in fields):
            variant: type[BaseModel] = section
            return variant
    return None
