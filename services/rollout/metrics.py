"""Metrics in Prometheus' text format, of all replicas: a request reaches one of them, which asks the others."""

from collections.abc import Iterable, Mapping
from itertools import chain

from starlette.responses import Response

METRICS: Mapping[str, tuple[str, str]] = {
    "http_requests_total": ("counter", "Answered requests over HTTP."),
    "http_sampled_tokens_total": ("counter", "Tokens that were sampled for requests over HTTP."),
    "policy_version": ("gauge", "Version of the weights that the replica serves."),
    "running_requests": ("gauge", "Unfinished requests in the engine, of all callers."),
    "waiting_rows": ("gauge", "Prompts that are admitted and not answered."),
    "proved_version": ("gauge", "Version of the last push that was proved."),
    "proved_difference": ("gauge", "Largest mean difference of log-probs in that proof, as a part of their spread."),
    "sessions": ("gauge", "Sessions that are held."),
    "session_bytes": ("gauge", "Bytes that they hold."),
    "session_forks_total": ("counter", "Requests that did not go on where a response of their session ended."),
}
"""Name, after `quartet_rollout_`, -> type and meaning."""
_PREFIX = "quartet_rollout_"
Line = tuple[str, dict[str, str], float]
"""Name, labels and number."""


def exposition(replicas: Iterable[Iterable[Line]], shared: Mapping[str, int]) -> Response:
    """The answer, in the text format of Prometheus.

    Args:
        replicas: metrics of each.
        shared: numbers of the application, by name.
    """
    lines = [*chain.from_iterable(replicas)]
    lines += [(name, {}, number) for name, number in shared.items()]
    texts = []
    for name, (kind, meaning) in METRICS.items():
        own = [(labels, number) for known, labels, number in lines if known == name]
        if own:
            texts += [f"# HELP {_PREFIX}{name} {meaning}", f"# TYPE {_PREFIX}{name} {kind}"]
            texts += [f"{_PREFIX}{name}{_shown(labels)} {number:.17g}" for labels, number in own]
    return Response("\n".join([*texts, ""]), media_type="text/plain; version=0.0.4")


def _shown(labels: Mapping[str, str]) -> str:
    # Values are names of Serve's replicas, paths of our table and numbers, which need no escapes.
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""
