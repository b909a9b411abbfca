"""A metric for lm-evaluation-harness: the score of each response by a scorer of a hub.

Put this file beside the task's YAML, and name the function there:

    task: gsm8k_hub
    dataset_path: openai/gsm8k
    dataset_name: main
    output_type: generate_until
    test_split: test
    doc_to_text: "{{question}}"
    doc_to_target: "{{answer}}"
    process_results: !function lm_eval_hub.process_results
    metric_list:
      - {metric: hub, aggregation: mean, higher_is_better: true}

    QUARTET_HUB=127.0.0.1:19000 QUARTET_SCORER=math lm_eval --tasks gsm8k_hub --include_path . ...

A response without a score ends the evaluation with the reason, as no number stands for it.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from quartet.security.credentials import connect
from services.reward.client import RewardClient

PROMPT, LABEL = "question", "answer"
"""Columns of the data set."""
TIMEOUT_S = 120.0
"""Deadline of a score."""


class UnscoredError(RuntimeError):
    """The hub has not scored a response."""


@cache
def _loop() -> asyncio.Runner:
    return asyncio.Runner()


@cache
def _client() -> RewardClient:
    hub = RewardClient(connect(os.environ.get("QUARTET_HUB", "127.0.0.1:19000")))
    return hub.named(os.environ.get("QUARTET_SCORER", ""))


def process_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The metrics of one response: `hub`, or `hub_` and the name for each of several named scores.

    Raises:
        UnscoredError: it has no score.
    """
    return _loop().run(_scored(str(doc[PROMPT]), results[0], str(doc[LABEL]), dict(doc)))


async def _scored(prompt: str, response: str, label: str, columns: Mapping[str, Any]) -> dict[str, float]:
    # The channel belongs to the loop of the first call, which is that of all calls.
    scores = await _client().score_texts([prompt], [response], labels=[label], columns=[columns], timeout_s=TIMEOUT_S)
    if scores.unscored:
        raise UnscoredError(f"{scores.scorer}: {scores.unscored[0]} (prompt {prompt[:80]!r})")
    single = len(scores.columns) == 1
    return {"hub" if single else f"hub_{name}": float(column[0]) for name, column in scores.columns.items()}
