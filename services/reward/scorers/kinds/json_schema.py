"""1 for an answer that is JSON which a schema admits."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jsonschema
from referencing import Registry
from referencing.exceptions import Unresolvable

from quartet.wire.json_object import not_a_number
from quartet.wire.pairs import Pair
from services.reward.scorers.kinds.answers import Given, UnusableError, by_pairs


def make(options: Mapping[str, Any]) -> Callable[[Sequence[Pair]], list[Given]]:
    """The scorer's function."""
    own = _validator(options["json_schema"]) if options["json_schema"] else None

    def read(value: Any) -> Any:
        try:
            schema = json.loads(value) if isinstance(value, str) else value
            if not isinstance(schema, dict):
                raise UnusableError("is no object, as a schema is")
            return _validator(schema)
        except (ValueError, RecursionError, jsonschema.SchemaError):
            raise UnusableError("is no JSON schema") from None

    def score(answer: str, wanted: Any) -> float:
        try:
            value = json.loads(answer, parse_constant=not_a_number)
        except (ValueError, RecursionError):
            return 0.0
        try:
            return float((wanted if own is None else own).is_valid(value))
        except (RecursionError, OverflowError):  # the latter for a number beyond any float
            return 0.0
        except Unresolvable:
            raise UnusableError("refers to another document") from None
        except Exception:
            if own is not None:
                raise
            # Of a part that is a schema only as some $ref says so: `check_schema` does not look at it.
            raise UnusableError("is no JSON schema") from None

    return by_pairs(score, options, expected=read if own is None else None)


def _validator(schema: Mapping[str, Any]) -> Any:
    if not isinstance(schema.get("$schema", ""), str):
        raise ValueError("$schema is no address")
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    return kind(schema, registry=Registry())  # which fetches nothing
