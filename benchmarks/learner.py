"""The learner against plain PyTorch, and its batching and packing against naive padding.

    python -m benchmarks.learner step      [--rounds 9] [--hidden 128] [--layers 2]
    python -m benchmarks.learner batching  [--rounds 5] [--hidden 128] [--layers 2] [--samples 128] [--tokens 4096]
                                           [--even 64]

A Llama with random weights on random data, on the GPU where there is one. The two sides of a ratio take turns in one
process, so that a machine that changes speed changes both; each ratio is that of the medians, and its range goes pair
by pair.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from benchmarks.turns import Side, ratio, report, take_turns
from orchestrator.algorithms.contract import Algorithm
from orchestrator.algorithms.loss import bound, importance_weights, policy_loss
from orchestrator.algorithms.ppo import PPO
from orchestrator.policy.trainer import PolicyTrainer
from quartet.config.learner import OptimizerConfig, PolicyConfig
from quartet.learner.minibatches import minibatches
from quartet.learner.shards import Pass
from quartet.models.device import default_device
from quartet.models.distribution import Distribution
from quartet.models.loading import load_causal
from quartet.models.numerics import masked_sum
from quartet.models.sequences import pad_pairs, pad_rows
from tests.learner_batches import PolicyBatch, train_policy
from tests.response_logits import response_logits

app = typer.Typer(help=__doc__, rich_markup_mode=None)
console = Console()

Rounds = Annotated[int, typer.Option(min=1, help="turns of each side that count")]
Hidden = Annotated[int, typer.Option(min=32, help="width of the model")]
Layers = Annotated[int, typer.Option(min=1, help="depth of the model")]
VOCABULARY, PROMPT, SEED = 106, 12, 0
OPTIMIZER = OptimizerConfig(learning_rate=2e-4)


@app.command()
def step(rounds: Rounds = 9, hidden: Hidden = 128, layers: Layers = 2) -> None:
    """Four PPO steps on 128 responses of 32 tokens: PolicyTrainer (ZeRO 0, one rank) over a plain loop."""
    algorithm = PPO(epochs=1, minibatch_size=32)
    batch = _batch([32] * 128)
    with _model(hidden, layers) as folder:
        trainer = PolicyTrainer(PolicyConfig(model=folder, optimizer=OPTIMIZER), algorithm, Distribution(1.0))
        plain = Plain(folder, algorithm)
        sides: dict[str, Side] = {
            "learner": lambda: train_policy(trainer, batch, SEED),
            "plain PyTorch": lambda: plain.train(batch, SEED),
        }
        seconds = take_turns(sides, rounds)
    report("seconds for four steps", seconds, "{:.3f}")
    ratio("learner / plain PyTorch", seconds["learner"], seconds["plain PyTorch"])


class Plain:
    """The same model, loss, order of minibatches and AdamW without DeepSpeed."""

    def __init__(self, folder: str, algorithm: Algorithm) -> None:
        self._device = default_device()
        self._model: Any = load_causal(folder, "float32").to(self._device)
        self._ppo = algorithm
        config = OPTIMIZER
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def train(self, batch: PolicyBatch, seed: int) -> list[float]:
        """The loss of each step."""
        self._model.train()
        count, size = len(batch.prompts), self._ppo.minibatch_size
        tokens = sum(len(response) for response in batch.responses) * size / count
        return [self._step(batch, rows, tokens) for rows in minibatches(count, epochs=1, size=size, seed=seed)]

    def _step(self, batch: PolicyBatch, rows: Sequence[int], tokens: float) -> float:
        algorithm = self._ppo
        assert batch.old_logprobs is not None
        prompts, responses = [batch.prompts[i] for i in rows], [batch.responses[i] for i in rows]
        pairs = pad_pairs(prompts, responses, self._device, last=False)
        sampled, old, advantages = (
            pad_rows([values[i] for i in rows], pairs.width, self._device)
            for values in (batch.logprobs, batch.old_logprobs, batch.advantages)
        )
        mask = pairs.action_mask
        logits = response_logits(self._model, pairs)
        new = Distribution().logprobs(logits, pairs)
        result = policy_loss(
            new,
            old,
            advantages,
            mask,
            bound=bound("ppo", low=algorithm.clip_eps_low, high=algorithm.clip_eps_high, dual=algorithm.dual_clip),
            weights=importance_weights(old, sampled, mask, cap=algorithm.importance_cap),
            denominator=tokens,
        )
        float(masked_sum(-new.detach(), mask) / tokens)
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), OPTIMIZER.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(result.loss.detach())


@app.command()
def batching(
    rounds: Rounds = 5,
    hidden: Hidden = 128,
    layers: Layers = 2,
    samples: Annotated[int, typer.Option(min=1, help="responses in the minibatch")] = 128,
    tokens: Annotated[int, typer.Option(min=268, help="most tokens of a micro-batch")] = 4096,
    even: Annotated[int | None, typer.Option(min=1, max=256, help="responses of so many tokens each")] = None,
) -> None:
    """One step on responses of 64 tokens in the mean and 256 at most: packed, padded among like lengths, and naively.

    Naive: so many sequences in the order of arrival as fit at the greatest length, padded to their own longest.
    """
    lengths = [even] * samples if even else _uneven(samples)
    batch, size = _batch(lengths), tokens // (PROMPT + max(lengths))
    arrival = [Pass(tuple(range(samples)[first : first + size])) for first in range(0, samples, size)]
    with _model(hidden, layers) as folder:
        padded, packed = (
            PolicyConfig(model=folder, optimizer=OPTIMIZER, micro_batch_tokens=tokens, packing=packing)
            for packing in (False, True)
        )
        sides = {
            "packed": one_step(packed, batch),
            "like lengths together": one_step(padded, batch),
            "order of arrival": one_step(padded, batch, arrival),
        }
        seconds = take_turns(sides, rounds)
    speeds = {name: [sum(lengths) / s for s in taken] for name, taken in seconds.items()}
    console.print(
        f"responses: mean {np.mean(lengths):.0f}, median {np.median(lengths):.0f}, max {max(lengths)} tokens"
    )
    report("response tokens/s", speeds, "{:,.0f}")
    for left, right in combinations(speeds, 2):
        ratio(f"{left} / {right}", speeds[left], speeds[right])


def one_step(config: PolicyConfig, batch: PolicyBatch, parts: Sequence[Pass] | None = None) -> Side:
    """Trains on the whole batch as one minibatch, in the learner's own parts if none are given."""
    trainer = PolicyTrainer(config, PPO(epochs=1, minibatch_size=len(batch.prompts)), Distribution(1.0))
    if parts is not None:
        trainer.learner.passes = lambda *_, **__: list(parts)  # type: ignore[method-assign]
    return lambda: train_policy(trainer, batch, SEED)


def _uneven(count: int) -> list[int]:
    """Lengths of 64 in the mean and 256 at most: many short ones and a few long."""
    drawn = np.random.default_rng(SEED).exponential(64, count)
    lengths = np.clip(drawn * 64 / drawn.mean(), 4, 256).round().astype(int)
    lengths[lengths.argmax()] = 256
    return [int(length) for length in lengths]


@contextmanager
def _model(hidden: int, layers: int) -> Iterator[str]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 32),
        max_position_embeddings=512,
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        yield folder


def _batch(lengths: Sequence[int]) -> PolicyBatch:
    draw = np.random.default_rng(SEED)
    old = [draw.normal(-3, 1, length).astype(np.float32) for length in lengths]
    return PolicyBatch(
        prompts=[draw.integers(4, VOCABULARY, PROMPT).astype(np.int32) for _ in lengths],
        responses=[draw.integers(4, VOCABULARY, length).astype(np.int32) for length in lengths],
        logprobs=old,
        old_logprobs=old,
        ref_logprobs=old,
        advantages=[draw.normal(0, 1, length).astype(np.float32) for length in lengths],
        kl_coef=0.0,
    )


if __name__ == "__main__":
    app()
