"""The longest waits of a step, as a phrase."""

from collections.abc import Mapping

_PARTS = {"policy": "learner", "rollout": "rollout"}
"""The parts of which the phrase speaks, and their names in it."""
_AWAITED_WORDS = {
    "rollout": "samples",
    "scoring": "scores",
    "policy": "the policy",
    "critic": "the critic",
    "push": "the push",
    "evaluation": "the evaluation",
    "checkpoint": "the checkpoint",
    "loop": "the orchestrator",
}
_LEAST_SHARE = 0.01
"""Smallest share that is worth a word."""


def who_waits(metrics: Mapping[str, float]) -> str:
    """The longest wait of learner and rollout, such as `learner waited 38 % for samples, rollout 12 % for the push`;
    empty if they hardly waited or `wait/…` was not measured."""
    said: list[str] = []
    for part, name in _PARTS.items():
        waits = {whom: metrics.get(f"wait/{part}/{whom}", 0.0) for whom in _AWAITED_WORDS}
        whom = max(waits, key=lambda each: waits[each])
        if waits[whom] >= _LEAST_SHARE:
            verb = "" if said else "waited "
            said.append(f"{name} {verb}{100 * waits[whom]:.0f} % for {_AWAITED_WORDS[whom]}")
    return ", ".join(said)
