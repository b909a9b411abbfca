"""Shares of the wall clock as metrics, from what each part did. Pure functions."""

from collections.abc import Sequence

from orchestrator.tracing.activity import AWAITED, LOOP, OWN_WORK, TRACK_PARTS, WORKING, Stretch
from orchestrator.tracing.spans import Window

WALL = "seconds/wall"
"""Metric: seconds from the end of the step before to the end of this one."""
LOOPS = (*AWAITED, OWN_WORK)
"""Names of the parts into which the loop's wall clock is divided."""


def shares(stretches: Sequence[Stretch]) -> dict[str, float]:
    """The share of the window in which each part worked and waited.

    `wait/loop/<what>` has every one of LOOPS; these add up to 1. For each part `work/<part>` and those
    `wait/<part>/<whom>` that are not 0 add up to 1 too.
    """
    total = sum(stretch.ended - stretch.began for stretch in stretches if stretch.part == LOOP)
    total = total or 1.0  # an empty window has no stretches
    metrics = {f"wait/{LOOP}/{what}": 0.0 for what in LOOPS}
    metrics |= {f"work/{stretch.part}": 0.0 for stretch in stretches if stretch.part != LOOP}
    for stretch in stretches:
        name = f"work/{stretch.part}" if stretch.doing == WORKING else f"wait/{stretch.part}/{stretch.doing}"
        metrics[name] = metrics.get(name, 0.0) + (stretch.ended - stretch.began) / total
    return metrics


def generation_speed(window: Window, share: float) -> dict[str, float]:
    """`tokens_per_s/generation`: tokens of the responses that were finished in the window, for each second in which
    rollout worked, `share` of it. Nothing if no response was finished.

    The time of a response alone would count its wait for others, with which it shares the engines.
    """
    rollout = (span.args for span in window.spans if TRACK_PARTS.get(span.track) == "rollout")
    tokens = sum(int(args.get("tokens", 0)) for args in rollout)
    seconds = share * (window.ended - window.began)
    return {"tokens_per_s/generation": tokens / seconds} if tokens and seconds else {}
