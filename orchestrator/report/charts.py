"""The charts of a run's report: their metrics, titles and units."""

from collections.abc import Collection, Iterable, Sequence
from itertools import cycle
from typing import Any

from orchestrator.monitoring.metrics import between, judge_names
from orchestrator.report.svg import PALETTE, Chart, Line, Panel
from orchestrator.tracing.shares import LOOPS

WAITING = "Who worked and who waited"
"""The heading under which the page puts the last steps' picture too."""
COLOURS = {
    "rollout": "blue",
    "environment": "brown",
    "scoring": "orange",
    "policy": "green",
    "critic": "purple",
    "push": "sky",
    "evaluation": "amber",
    "checkpoint": "yellow",
    "loop": "grey",
}
"""Part of a run, or another thing that is waited for -> its colour in these charts and in the picture."""
_STAGES = {
    "take": "samples and scores",
    "logprobs": "log-probs",
    "train": "training",
    "publish": "push",
    "evaluate": "evaluation",
}
"""Stage of the loop, as in `seconds/<stage>` -> what it is called here."""


def sections(metrics: Collection[str], *, stale: bool) -> dict[str, list[Chart]]:
    """The charts by heading, in the page's order.

    Args:
        metrics: names of all metrics that were recorded, of which judges, named scores and tasks have a line each.
        stale: True if the run trained on samples of older versions.
    """
    judges, scores = judge_names(metrics), between(metrics, "score/", "/mean")
    tasks = between(metrics, "task/", "/response/length_mean")
    return {
        "Learning": [SCORE, *_scores(scores), _judges(judges), *_tasks(tasks), LOSS, ACCURACY],
        "Policy": [KL, CLIPPED, ENTROPY, MISMATCH, CORRECTION, *([AGE] if stale else [])],
        "Value function and responses": [VALUE, RESPONSES],
        "Time": [SECONDS, THROUGHPUT],
        WAITING: [LOOP, _part("rollout", "Rollout"), _part("policy", "Policy")],
    }


def _panel(y_label: str, *lines: Line, **options: Any) -> Panel:
    return Panel(y_label, lines, **options)


def _chart(title: str, note: str, *panels: Panel) -> Chart:
    return Chart(title, note, panels)


def _shares(lines: Iterable[Line]) -> Panel:
    return _panel("% of the wall clock", *lines, kind="stacked")


def _judges(names: Sequence[str]) -> Chart:
    colours = cycle(("green", "purple", "sky", "amber"))
    lines = [Line(f"eval/{name}", name, next(colours), held_out=True) for name in names]
    return _chart("Judges", "On held-out prompts. The policy is never trained on them.", _panel("verdict", *lines))


def _scores(names: Sequence[str]) -> list[Chart]:
    """Named scores and their weights: of the first, if there are more than colours."""
    if not names:
        return []
    lines, drawn = _coloured(names, "names")
    return [
        _chart(
            "Scores by name",
            f"Of the training batch, as the reward service gives them, and their weights in the sum.{drawn}",
            _panel("score", *(Line(f"score/{name}/mean", name, colour) for name, colour in lines)),
            _panel("weight", *(Line(f"score/{name}/weight", name, colour) for name, colour in lines), from_zero=True),
        ),
        _chart(
            "Held-out scores by name",
            "On held-out prompts, with 95 % intervals.",
            _panel("score", *(Line(f"eval/score/{name}", name, colour, held_out=True) for name, colour in lines)),
        ),
    ]


def _tasks(names: Sequence[str]) -> list[Chart]:
    """Scores and lengths by task: of the first tasks, if there are more than colours."""
    if not names:
        return []
    lines, drawn = _coloured(names, "tasks")
    return [
        _chart(
            "Score by task",
            f"Of the training batch, by the column data.task_key of the prompts.{drawn}",
            _panel("score", *(Line(f"task/{name}/score/mean", name, colour) for name, colour in lines)),
        ),
        _chart(
            "Held-out score by task",
            "On held-out prompts, with 95 % intervals.",
            _panel(
                "score", *(Line(f"eval/task/{name}/score", name, colour, held_out=True) for name, colour in lines)
            ),
        ),
        _chart(
            "Length by task",
            "Mean response of the training batch.",
            _panel(
                "tokens",
                *(Line(f"task/{name}/response/length_mean", name, colour) for name, colour in lines),
                from_zero=True,
            ),
        ),
    ]


def _coloured(names: Sequence[str], what: str) -> tuple[list[tuple[str, str]], str]:
    """Names with the colours of their lines, and the words for a reader if that is not all of them."""
    lines = list(zip(names, PALETTE, strict=False))
    left_out = f" The first {len(lines)} of {len(names)} {what}; metrics.jsonl has all."
    return lines, left_out * (len(names) > len(lines))


def _part(part: str, title: str) -> Chart:
    """Shares of one part's time."""
    waits = (Line(f"wait/{part}/{whom}", whom, COLOURS[whom], scale=100) for whom in COLOURS if whom != part)
    works = Line(f"work/{part}", "works", COLOURS[part], scale=100)
    return _chart(title, "The share in which it works, and for whom it waits.", _shares([works, *waits]))


SCORE = _chart(
    "Score",
    "By the reward service. Held-out prompts with 95 % intervals.",
    _panel(
        "score",
        Line("score/mean", "training batch", "blue"),
        Line("eval/score", "held out", "orange", held_out=True),
    ),
)
LOSS = _chart(
    "Loss",
    "Of the objective on the examples. Held-out ones with 95 % intervals.",
    _panel(
        "nats",
        Line("train/loss", "training batch", "blue"),
        Line("eval/loss", "held out", "orange", held_out=True),
    ),
)
ACCURACY = _chart(
    "Accuracy",
    "Share of comparisons whose preferred answer has the higher score. Held-out ones with 95 % intervals.",
    _panel(
        "% of comparisons",
        Line("train/accuracy", "training batch", "blue", scale=100),
        Line("eval/accuracy", "held out", "orange", held_out=True, scale=100),
    ),
)
KL = _chart(
    "KL to the reference",
    "Summed over a response. Below it the coefficient of its penalty.",
    _panel(
        "KL, nats",
        Line("kl/reference", "training batch", "blue"),
        Line("eval/kl", "held out", "orange", held_out=True),
    ),
    _panel("coefficient", Line("kl/coef", "coefficient", "purple"), from_zero=True),
)
CLIPPED = _chart(
    "Clipped tokens",
    "Share of tokens whose ratio of new to old probability left the clip range.",
    _panel(
        "% of tokens",
        Line("policy/clip_fraction_low", "below", "blue", scale=100),
        Line("policy/clip_fraction_high", "above", "orange", scale=100, dashed=True),
        from_zero=True,
    ),
)
ENTROPY = _chart(
    "Entropy",
    "Of the policy's next-token distribution, estimated by the mean of −log π over the response tokens.",
    _panel("nats per token", Line("policy/sampled_entropy", "entropy", "blue"), from_zero=True),
)
MISMATCH = _chart(
    "Log-prob mismatch",
    "Of the same tokens by the rollout engine, as it sampled them, and by the learner before its update. Samples of "
    "older versions differ rightly; those of the present version only by rounding.",
    _panel(
        "|Δ log-prob|, nats",
        Line("mismatch/mean_abs", "mean", "blue"),
        Line("mismatch/max_abs", "largest", "orange", dashed=True),
        Line("mismatch/present_mean_abs", "mean of the present version", "green", dashed=True),
        kind="log",
    ),
)
CORRECTION = _chart(
    "Off-policy correction",
    "Share of tokens that it truncates or leaves out, and the effective sample size of the ratios without it.",
    _panel("% of tokens", Line("off_policy/corrected", "corrected", "orange", scale=100), from_zero=True),
    _panel("% of tokens", Line("off_policy/ess", "effective size", "blue", scale=100), from_zero=True),
)
AGE = _chart(
    "Age of samples",
    "Versions between the one that sampled a token and the policy that trained on it.",
    _panel(
        "versions",
        Line("staleness/mean", "mean over tokens", "blue"),
        Line("policy/staleness", "oldest token", "orange", dashed=True),
        from_zero=True,
    ),
)
VALUE = _chart(
    "Value function",
    "An explained variance of 1 is perfect; 0 is no better than a constant.",
    _panel("value loss", Line("value/loss", "loss", "blue"), from_zero=True),
    _panel("explained variance", Line("value/explained_variance", "explained", "green")),
)
RESPONSES = _chart(
    "Responses",
    "Their length, and the share cut off at the limit of new tokens.",
    _panel(
        "tokens",
        Line("response/length_mean", "mean", "blue"),
        Line("response/length_max", "longest", "orange", dashed=True),
        from_zero=True,
    ),
    _panel("% cut off", Line("response/truncated", "cut off", "purple", scale=100), from_zero=True),
)
SECONDS = _chart(
    "Time per stage",
    "How long the loop is in each of its stages, one after the other. With max_staleness above 0 the services work "
    "and weights are pushed meanwhile.",
    _panel(
        "seconds per step",
        *(Line(f"seconds/{stage}", _STAGES[stage], colour) for stage, colour in zip(_STAGES, PALETTE, strict=False)),
        kind="stacked",
    ),
)
THROUGHPUT = _chart(
    "Throughput",
    "Tokens generated per second in which rollout worked, and tokens trained on per second of training.",
    _panel(
        "tokens per second",
        Line("tokens_per_s/generation", "generation", "blue"),
        Line("tokens_per_s/training", "training", "orange", dashed=True),
        from_zero=True,
    ),
)
LOOP = _chart(
    "The loop",
    "What it waits for. Nothing is missing: all shares add up to the wall clock.",
    _shares(Line(f"wait/loop/{what}", what, colour, scale=100) for what, colour in zip(LOOPS, PALETTE, strict=False)),
)
