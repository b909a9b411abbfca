"""Cost of checkpoints for a run that takes one every ten steps, with and without writing them beside training.

    python -m benchmarks.checkpoint_cost [--rounds 7] [--hidden 256] [--layers 4]

A block is ten optimizer phases of the policy (PolicyTrainer, one rank, ZeRO 0), which is all that a run without
generation would do: in a real one the same checkpoint is spread over more time. Blocks without a checkpoint, with one
written in the background and with one written in between take turns: a machine that changes speed changes all.
"""

import shutil
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from orchestrator.config.algorithm import PPOConfig
from orchestrator.policy.trainer import PolicyBatch, PolicyTrainer
from quartet.config.base import MIB
from quartet.config.learner import OptimizerConfig, PolicyConfig
from quartet.models.distribution import Distribution
from recipes.common.tokenizer import word_tokenizer

STEPS, SAMPLES, PROMPT, RESPONSE = 10, 128, 12, 32
VOCABULARY = 106
console = Console()


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    hidden: Annotated[int, typer.Option(min=32)] = 256,
    layers: Annotated[int, typer.Option(min=1)] = 4,
) -> None:
    """Runs the benchmark and prints its results."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        _model(Path(folder) / "model", hidden, layers)
        config = PolicyConfig(model=f"{folder}/model", optimizer=OptimizerConfig(learning_rate=1e-4))
        trainer = PolicyTrainer(config, PPOConfig(epochs=2, minibatch_size=32), Distribution(1.0))
        bench = Bench(trainer, Path(folder) / "snapshot")
        seconds: dict[str, list[float]] = {"none": [], "background": [], "in between": []}
        for round_ in range(-1, rounds):
            for name, values in seconds.items():
                took = bench.block(name)
                if round_ >= 0:
                    values.append(took)
        size = sum(file.stat().st_size for file in bench.folder.rglob("*") if file.is_file()) / MIB
    plain = median(seconds["none"])
    console.print(f"{STEPS} steps: {plain:.2f} s; a checkpoint of {size:.0f} MiB")
    for name in ("background", "in between"):
        pairs = [with_ / without for with_, without in zip(seconds[name], seconds["none"], strict=True)]
        ratio = median(seconds[name]) / plain
        console.print(f"{name} / none: {ratio:.3f} (pair by pair {min(pairs):.3f} to {max(pairs):.3f})")
    share = median(bench.waited) / plain
    console.print(f"of the background's, waiting: {median(bench.waited):.3f} s, {100 * share:.2f} % of the block")


class Bench:
    """Blocks of steps, each with one checkpoint or none."""

    def __init__(self, trainer: PolicyTrainer, folder: Path) -> None:
        self._trainer = trainer
        self._batch = _batch()
        self._writer = ThreadPoolExecutor(1)
        self.folder = folder
        self.waited: list[float] = []

    def block(self, checkpoint: str) -> float:
        """Seconds of a block, from its first step to the end of its last, and of its checkpoint."""
        began = time.perf_counter()
        writing: Future[None] | None = None
        if checkpoint != "none":
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            taking = time.perf_counter()
            self._trainer.snapshots.take_snapshot(str(self.folder / "policy"), 0)
            if checkpoint == "background":
                self.waited.append(time.perf_counter() - taking)
                writing = self._writer.submit(self._trainer.snapshots.write_snapshot)
            else:
                self._trainer.snapshots.write_snapshot()
        for step in range(STEPS):
            self._trainer.train(self._batch, step)
        if writing:
            writing.result()
        return time.perf_counter() - began


def _model(folder: Path, hidden: int, layers: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    word_tokenizer([f"w{index}" for index in range(VOCABULARY - 8)], 512).save_pretrained(folder)


def _batch() -> PolicyBatch:
    draw = np.random.default_rng(0)
    rows = [draw.normal(-3, 1, RESPONSE).astype(np.float32) for _ in range(SAMPLES)]
    return PolicyBatch(
        prompts=[draw.integers(4, 90, PROMPT).astype(np.int32) for _ in rows],
        responses=[draw.integers(4, 90, RESPONSE).astype(np.int32) for _ in rows],
        logprobs=rows,
        old_logprobs=rows,
        ref_logprobs=rows,
        advantages=[draw.normal(0, 1, RESPONSE).astype(np.float32) for _ in rows],
        kl_coef=0.0,
    )


if __name__ == "__main__":
    typer.run(main)
