"""Works and waits of each part of a run, from spans. Pure functions."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from orchestrator.tracing.spans import Span, Window

PARTS = ("rollout", "scoring", "policy", "critic", "push")
"""The parts of a run that work side by side."""
TRACK_PARTS = {
    "rollout": "rollout",
    "environment": "environment",
    "reward": "scoring",
    "reference": "scoring",
    "values": "scoring",
    "policy": "policy",
    "critic": "critic",
    "push": "push",
}
"""Track -> part, in the order of a trace; an environment, which some runs have, is only waited for."""
LOOP = "loop"
WORKING = "working"
AWAITED = {
    "samples": "rollout",
    "scores": "scoring",
    "logprobs": "policy",
    "training": "policy",
    "push": "push",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
}
"""A wait of the loop -> the part that it waits for."""
OWN_WORK = "own"
"""The loop's own work."""
_WORKS_BESIDE_POLICY = {"logprobs": "scoring", "training": "critic"}
"""A wait for the policy -> the part that works beside it: on the values, or on the critic."""
_HANDED_OVER_BY = {"rollout": ("push", "environment"), "scoring": ("rollout", "environment")}
"""Part -> the parts that hand it its work without the loop."""


def parts_with(learners: Collection[str]) -> list[str]:
    """The parts of a run that trains these models: all of PARTS, or all but the critic."""
    return [part for part in PARTS if part != "critic" or part in learners]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A while in which one part did one thing."""

    part: str
    """One of PARTS, or LOOP."""
    doing: str
    """WORKING, or the part that it waits for; for LOOP a key of AWAITED, or OWN_WORK."""
    began: float
    ended: float


def stretches(window: Window, parts: Sequence[str] = PARTS) -> list[Stretch]:
    """Divides the window by what the loop and each of these parts did. A part's stretches do not overlap, and cover
    it all.

    A part works while a span of its tracks is open. Otherwise it waits: rollout for a push that is under way, scoring
    for rollout, both for an environment that answers, and failing that each for what the loop waits for at that
    moment. For example in lock-step, with a window of 10 s in which samples are generated until 4 and the policy
    trains from 5 to 9 while the loop waits for it, rollout works for 4 s, waits for the policy for 4 s and for the
    loop for 2 s.

    A moment in which several waits of the loop are open belongs to the one that began last.
    """
    done: dict[str, list[Stretch]] = {part: [] for part in (LOOP, *parts)}
    for began, ended, working, waiting in _moments(window):
        _extend(done[LOOP], Stretch(LOOP, waiting, began, ended))
        for part in parts:
            _extend(done[part], Stretch(part, _doing(part, working, waiting), began, ended))
    return [stretch for each in done.values() for stretch in each]


def _moments(window: Window) -> Iterator[tuple[float, float, Mapping[str, int], str]]:
    """Cuts the window wherever a span begins or ends: begin, end, open spans by part, and what the loop waits for."""
    changes: list[tuple[float, int, Span | None]] = [(window.ended, 0, None)]
    for span in window.spans:
        began, ended = max(span.began, window.began), min(span.ended, window.ended)
        if ended > began and (span.track == LOOP or span.track in TRACK_PARTS):
            changes += [(began, 1, span), (ended, -1, span)]
    working: Counter[str] = Counter()
    waits: list[Span] = []
    now = window.began
    for moment, change, its in sorted(changes, key=lambda each: each[0]):
        if moment > now:
            yield now, moment, working, max(waits, key=attrgetter("began")).name if waits else OWN_WORK
            now = moment
        if its is None:
            continue
        if its.track != LOOP:
            working[TRACK_PARTS[its.track]] += change
        elif change > 0:
            waits.append(its)
        else:
            waits.remove(its)


def _doing(part: str, working: Mapping[str, int], waiting: str) -> str:
    if working[part]:
        return WORKING
    for other in _HANDED_OVER_BY.get(part, ()):
        if working[other]:
            return other
    awaited = AWAITED.get(waiting, LOOP)
    if waiting in _WORKS_BESIDE_POLICY and not working["policy"]:
        awaited = _WORKS_BESIDE_POLICY[waiting] if working[_WORKS_BESIDE_POLICY[waiting]] else LOOP
    return LOOP if awaited == part else awaited


def _extend(done: list[Stretch], last: Stretch) -> None:
    """Appends a stretch, or makes the one before it longer if the part goes on doing the same."""
    if done and done[-1].doing == last.doing:
        last = replace(done.pop(), ended=last.ended)
    done.append(last)
