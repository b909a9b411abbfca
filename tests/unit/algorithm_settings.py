"""Settings of algorithms for tests."""

from collections.abc import Mapping
from typing import Any

from orchestrator.algorithms.registry import DEFAULT, presets


def plain(given: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """The section with these settings: those `given`, of the `others` the ones that have an effect with the kind, and
    no whitening unless it is given or the kind's baseline."""
    preset = presets()[given.get("kind", DEFAULT.kind)]
    others = ({"scale": "none"} if preset.scale == "batch" and preset.baseline != "batch" else {}) | others
    if not preset.needs_critic:
        others.pop("gae_lambda", None)
    return others | {**given}
