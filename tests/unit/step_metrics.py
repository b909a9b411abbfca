"""Names, among those of what a step measures, that pages and the report rely on."""

from collections.abc import Mapping

from orchestrator.tracing.shares import LOOPS

STEP_METRICS = {
    *("score/mean", "score/std", "reward/mean", "kl/reference", "kl/coef", "value/explained_variance"),
    *("response/length_mean", "response/length_max", "response/truncated"),
    *("mismatch/mean_abs", "mismatch/present_mean_abs", "mismatch/max_abs", "mismatch/kl", "mismatch/capped"),
    *(
        "off_policy/ess",
        "off_policy/ratio_p01",
        "off_policy/ratio_p50",
        "off_policy/ratio_p99",
        "off_policy/corrected",
    ),
    *("staleness/mean", "staleness/share_0"),
    *("policy/loss", "policy/sampled_entropy", "value/loss", "value/grad_norm", "policy/version", "policy/staleness"),
    *("tokens_per_s/generation", "tokens_per_s/training"),
    *("samples/asked", "samples/repeated", "samples/discarded", "samples/resumed", "samples/tokens_kept"),
    *("samples/used", "samples/used_total", "seconds/checkpoint"),
    *("seconds/generate", "seconds/score", "seconds/logprobs", "seconds/train", "seconds/push", "seconds/step"),
    "seconds/wall",
    *(f"wait/loop/{what}" for what in LOOPS),
    *("work/rollout", "work/scoring", "work/policy", "work/critic", "work/push"),
    *("seconds/take", "seconds/publish"),
}


def untimed(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that do not depend on the clock."""
    timed = ("seconds/", "tokens_per_s/", "wait/", "work/")
    return {name: value for name, value in metrics.items() if not name.startswith(timed)}


def steady(metrics: Mapping[str, float]) -> set[str]:
    """Names but those of who waited for whom, which depend on moments between two spans."""
    return {name for name in metrics if not name.startswith("wait/") or name.startswith("wait/loop/")}
