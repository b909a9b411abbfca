"""The policy learner's step in bfloat16: tokens/s, MFU, and over a plain loop with the same kernels. Eight minutes.

    python -m benchmarks.gpu.training [--sizes 0.5B,1.5B] [--tokens 16384] [--length 2048] [--device cuda]
                                      [--sides SIDE;SIDE]

One optimizer step on `tokens` packed tokens, sequences of `length`, of which half are the response. MFU counts 6
operations for each parameter and token and 6 x layers x width x length for each token's attention, which is causal,
over `--peak` TFLOP/s (989: a dense H100 or H200 by its data sheet). The plain loop is transformers' model in bfloat16
with fp32 masters and torch's fused AdamW. One more step of each side runs under torch's profiler: the share of the
step in which the GPU computes, the seconds of each kind of kernel, and the kernels that take longest. Then five steps
in float32 on this device and on a CPU, whose losses should agree; these are left out where `--sides` names some of
the sides.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.arguments import check_known
from benchmarks.gpu.breakdown import breakdown, recorded
from benchmarks.gpu.models import make, shape
from benchmarks.gpu.results import Cell, Results, alone, seconds
from orchestrator.algorithms.contract import Algorithm
from orchestrator.algorithms.loss import bound, importance_weights, policy_loss
from orchestrator.algorithms.ppo import PPO
from orchestrator.policy.trainer import PolicyTrainer
from quartet.config.learner import OptimizerConfig, PolicyConfig
from quartet.learner.recomputed import recompute_activations
from quartet.models.distribution import Distribution
from quartet.models.loading import load_causal
from quartet.models.numerics import masked_sum
from quartet.models.sequences import PairTensors, concatenate_pairs
from tests.learner_batches import PolicyBatch, train_policy
from tests.response_logits import response_logits

MODULE = "benchmarks.gpu.training"
OPTIMIZER = OptimizerConfig(learning_rate=1e-6)


def main(
    sizes: str = "0.5B,1.5B",
    tokens: Annotated[int, typer.Option(help="of the step, packed")] = 16_384,
    length: Annotated[int, typer.Option(help="of each sequence")] = 2048,
    device: str = "cuda",
    sides: Annotated[str, typer.Option(help="those to measure, separated by semicolons; all by default")] = "",
    peak: Annotated[float, typer.Option(help="TFLOP/s of the device in bfloat16")] = 989,
    out: Path = Path("runs/gpu"),
) -> None:
    """Runs the benchmark and prints its results."""
    named = sides.split(";") if sides else list(SIDES)
    check_known(named, SIDES, "--sides")
    results = Results("training", out)
    for size in sizes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder), size)
            for name in named:
                side = ["--side", name, folder, size, str(tokens), str(length), device, str(peak)]
                results.attempt(f"{size} {name}", partial(alone, MODULE, side))
    if not sides:
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder), sizes.split(",")[0], "float32")
            results.attempt("fp32, 5 steps, here and on a CPU", partial(_agreement, folder))
    results.show()


def made(vocabulary: int, count: int, length: int) -> PolicyBatch:
    """Random sequences, half prompt and half response."""
    draw = np.random.default_rng(0)
    rows = [draw.integers(2, vocabulary, length).astype(np.int32) for _ in range(count)]
    old = [draw.normal(-3, 1, length - length // 2).astype(np.float32) for _ in range(count)]
    return PolicyBatch(
        prompts=[row[: length // 2] for row in rows],
        responses=[row[length // 2 :] for row in rows],
        logprobs=old,
        old_logprobs=old,
        ref_logprobs=old,
        advantages=[draw.normal(0, 1, len(row)).astype(np.float32) for row in old],
        kl_coef=0.0,
    )


def _learner(folder: str, batch: PolicyBatch, where: torch.device, **fields: Any) -> Callable[[], object]:
    settings: dict[str, Any] = {"dtype": "bfloat16", "zero_stage": 1, "packing": True, "micro_batch_tokens": 1 << 20}
    config = PolicyConfig.parse(settings | fields | {"model": folder, "optimizer": {"learning_rate": 1e-6}}, "policy")
    trainer = PolicyTrainer(config, PPO(epochs=1, minibatch_size=len(batch.prompts)), Distribution())
    return lambda: train_policy(trainer, batch, 0)


def _plain(folder: str, batch: PolicyBatch, where: torch.device, *, checkpointing: bool) -> Callable[[], object]:
    loop, algorithm = Plain(folder, batch, where, checkpointing=checkpointing), PPO()
    return lambda: loop.step(algorithm)


class Plain:
    """The same model, loss and AdamW without DeepSpeed."""

    def __init__(self, folder: str, batch: PolicyBatch, where: torch.device, *, checkpointing: bool) -> None:
        self._model: Any = load_causal(folder, "bfloat16", packing=True).to(where)
        self._model.train()
        if checkpointing:
            recompute_activations(self._model)
        self._masters = [parameter.detach().float() for parameter in self._model.parameters()]
        self._optimizer = torch.optim.AdamW(self._masters, lr=OPTIMIZER.learning_rate, fused=True)
        self._batch, self._where = batch, where

    def step(self, algorithm: Algorithm) -> float:
        """One optimizer step; the loss."""
        batch = self._batch
        pairs = concatenate_pairs(batch.prompts, batch.responses, self._where, last=False)
        loss = self._loss(pairs, algorithm)
        loss.backward()
        parameters = list(self._model.parameters())
        torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.max_grad_norm)
        for master, parameter in zip(self._masters, parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(self._masters, parameters, strict=True):
                parameter.copy_(master)
        return float(loss.detach())

    def _loss(self, pairs: PairTensors, algorithm: Algorithm) -> torch.Tensor:
        assert self._batch.old_logprobs is not None
        old, advantages = pairs.spread(self._batch.old_logprobs), pairs.spread(self._batch.advantages)
        mask, count = pairs.action_mask, sum(pairs.lengths)
        logits = response_logits(self._model, pairs)
        new = Distribution().logprobs(logits, pairs)
        result = policy_loss(
            new,
            old,
            advantages,
            mask,
            bound=bound("ppo", low=algorithm.clip_eps_low, high=algorithm.clip_eps_high, dual=algorithm.dual_clip),
            weights=importance_weights(old, old, mask, cap=algorithm.importance_cap),
            denominator=count,
        )
        float(masked_sum(-new.detach(), mask) / count)
        return result.loss


SIDES: dict[str, Callable[..., Callable[[], object]]] = {
    "learner": _learner,
    "learner, compiled": partial(_learner, compile_layers=True),
    "learner, checkpointing": partial(_learner, gradient_checkpointing=True),
    "learner, padded": partial(_learner, packing=False),
    "learner, colocate": partial(_learner, colocate=True),
    "plain loop": partial(_plain, checkpointing=False),
    "plain loop, checkpointing": partial(_plain, checkpointing=True),
}
"""Each makes its model and gives its step."""


def print_side(name: str, folder: str, size: str, tokens: str, length: str, device: str, peak: str) -> None:
    """In a process of its own: the figures of one side."""
    where = torch.device(device)
    batch = made(shape(size).vocab_size, int(tokens) // int(length), int(length))
    step = SIDES[name](folder, batch, where)
    took = seconds(step, where, rounds=3)
    lengths = [len(p) + len(r) for p, r in zip(batch.prompts, batch.responses, strict=True)]
    memory = torch.cuda.max_memory_allocated(where) / 2**30 if where.type == "cuda" else 0.0
    mfu = operations(size, lengths) / took / float(peak) / 1e12
    figures: dict[str, Cell] = {"s": took, "tokens_s": round(sum(lengths) / took), "mfu_percent": 100 * mfu}
    figures["peak_gib"] = memory
    # After the step: with colocate the optimizer's state is elsewhere.
    figures["between_gib"] = torch.cuda.memory_reserved(where) / 2**30 if where.type == "cuda" else 0.0
    try:
        figures |= breakdown(recorded(step, where), took)
    except Exception as error:  # a profiler that does not work there takes no other figure along
        figures["longest"] = f"not profiled: {type(error).__name__}: {error}"[:200]
    print(json.dumps(figures))


def operations(size: str, lengths: list[int]) -> float:
    """Operations of forward and backward pass, without recomputation."""
    from quartet.models.size import ModelSize

    model = ModelSize.of(shape(size))
    attention = sum(6 * model.layers * model.hidden * length**2 for length in lengths)
    return 6.0 * model.parameters * sum(lengths) + attention


def _agreement(folder: str) -> dict[str, Cell]:
    """Largest difference between the losses of five steps."""
    on_device = alone(MODULE, ["--losses", folder])
    on_cpu = alone(MODULE, ["--losses", folder], CUDA_VISIBLE_DEVICES="")
    return {
        "largest_difference": max(abs(a - b) for a, b in zip(on_device, on_cpu, strict=True)),
        "last_loss": on_device[-1],
    }


def print_losses(folder: str) -> None:
    """In a process of its own, since a process has one device: five steps in float32."""
    config = PolicyConfig(model=folder, optimizer=OptimizerConfig(learning_rate=1e-4), packing=True)
    batch = made(config_vocabulary(folder), 4, 64)
    trainer = PolicyTrainer(config, PPO(epochs=1, minibatch_size=4), Distribution())
    print(json.dumps([train_policy(trainer, batch, step)["loss"] for step in range(5)]))


def config_vocabulary(folder: str) -> int:
    """Rows of the model in a folder."""
    return int(json.loads((Path(folder) / "config.json").read_text())["vocab_size"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--losses"]:
        print_losses(*sys.argv[2:])
    elif sys.argv[1:2] == ["--side"]:
        print_side(*sys.argv[2:])
    else:
        typer.run(main)
