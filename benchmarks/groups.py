"""The price of a group of responses to one prompt: the learner beside rows of their own, and the engine's prefill.

    python -m benchmarks.groups [--rounds 5] [--groups 4] [--prompt 256] [--hidden 256] [--layers 4]

A Llama with random weights on random data, groups of 8, responses of a quarter of the prompt's length in the mean.
The learner takes one optimizer step on the whole batch: with each prompt computed once for its group, with packed
rows of prompt and response each, and padded. The three take turns in one process. Then the engine samples the groups,
and its own count says how many tokens of prompts it computed.
"""

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from benchmarks.learner import OPTIMIZER, one_step
from benchmarks.turns import ratio, report, take_turns
from quartet.config.learner import PolicyConfig
from quartet.wire.codec import Ints
from tests.learner_batches import PolicyBatch
from tests.models import WORDS, make_policy
from tests.prefilled import prefilled

console = Console()
GROUP, SHARE, SEED = 8, 4, 0
"""Responses to a prompt, and a prompt's tokens for each token of a response in the mean."""


class RowsOfTheirOwn(PolicyConfig):
    """A packed learner that computes a prompt again for each response."""

    @property
    def shares_prompts(self) -> bool:
        """False."""
        return False


def main(
    rounds: Annotated[int, typer.Option(min=1, help="turns of each side that count")] = 5,
    groups: Annotated[int, typer.Option(min=1, help="prompts of the batch")] = 4,
    prompt: Annotated[int, typer.Option(min=32, help="tokens of a prompt")] = 256,
    hidden: Annotated[int, typer.Option(min=64, help="width of the model")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="depth of the model")] = 4,
    tokens: Annotated[int, typer.Option(min=64, help="most tokens of a micro-batch")] = 4096,
    sampled: Annotated[int, typer.Option(min=32, help="tokens of a prompt in the engine, in the mean")] = 1024,
) -> None:
    """Measures both and prints their ratios."""
    draw = np.random.default_rng(SEED)
    with tempfile.TemporaryDirectory() as made:
        shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
        heads = {"num_attention_heads": max(2, hidden // 32), "num_key_value_heads": max(2, hidden // 32)}
        longest = {"max_position_embeddings": 4 * max(prompt, sampled)}
        folder = make_policy(Path(made), kind="llama", tied=False, **shape, **heads, **longest)
        _learner(str(folder), _batch(draw, groups, prompt), tokens, rounds)
        lengths = draw.integers(3 * sampled // 4, 5 * sampled // 4 + 1, groups)
        asyncio.run(_engine(str(folder), [_ids(draw, int(length)) for length in lengths]))


def _learner(folder: str, batch: PolicyBatch, tokens: int, rounds: int) -> None:
    settings: dict[str, Any] = {"model": folder, "optimizer": OPTIMIZER, "micro_batch_tokens": tokens}
    sides = {
        "prompts once": one_step(PolicyConfig(**settings, packing=True), batch),
        "packed": one_step(RowsOfTheirOwn(**settings, packing=True), batch),
        "padded": one_step(PolicyConfig(**settings), batch),
    }
    seconds = take_turns(sides, rounds)
    report("seconds for a step", seconds, "{:.3f}")
    for other in ("packed", "padded"):
        ratio(f"{other} / prompts once", seconds[other], seconds["prompts once"])


async def _engine(folder: str, prompts: list[Ints]) -> None:
    """Samples a group of responses to each prompt, one prompt after the other."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from services.rollout.config import RolloutConfig
    from services.rollout.sample import Sampling
    from services.rollout.vllm.engine import VLLMEngine

    settings = {"model": folder, "max_length": 2 * max(map(len, prompts)), "kv_cache_mib": 256}
    engine = await VLLMEngine.start(RolloutConfig.parse(settings, "rollout"))
    sampling = Sampling(max_new_tokens=8, ignore_eos=True)
    try:
        with prefilled(engine) as computed:
            for prompt in prompts:
                await asyncio.gather(*(engine.generate(0, prompt, sampling, seed) for seed in range(GROUP)))
    finally:
        engine.shutdown()
    share = sum(computed) / sum(map(len, prompts))
    console.print(f"engine: prompt tokens computed for {GROUP} responses / tokens of the prompt: {share:.2f}")


def _batch(draw: np.random.Generator, groups: int, prompt: int) -> PolicyBatch:
    """Responses of half the mean length to one and a half times it."""
    mean, prompts = prompt // SHARE, [_ids(draw, prompt) for _ in range(groups)]
    lengths = [int(length) for length in draw.integers(mean // 2, 3 * mean // 2 + 1, groups * GROUP)]
    old = [draw.normal(-3, 1, length).astype(np.float32) for length in lengths]
    return PolicyBatch(
        prompts=[ids for ids in prompts for _ in range(GROUP)],
        responses=[_ids(draw, length) for length in lengths],
        logprobs=old,
        old_logprobs=old,
        ref_logprobs=old,
        advantages=[draw.normal(0, 1, length).astype(np.float32) for length in lengths],
        kl_coef=0.0,
    )


def _ids(draw: np.random.Generator, count: int) -> Ints:
    return draw.integers(4, len(WORDS), count).astype(np.int32)


if __name__ == "__main__":
    typer.run(main)
