"""Settings of algorithms for tests."""

from collections.abc import Mapping
from typing import Any

from orchestrator.algorithms.registry import DEFAULT, algorithms


def plain(given: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """The section with these settings: those `given`, of the `others` the ones that the kind has, and no whitening
    unless it is given."""
    fields = algorithms()[given.get("kind", DEFAULT.kind)].model_fields
    others = {"whiten_advantages": False} | others
    return {name: value for name, value in others.items() if name in fields} | {**given}
