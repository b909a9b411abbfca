"""Processor time of the corrections of older samples, as a part of the policy's update.

    python -m benchmarks.correction_cost [--rounds 20] [--batch 128] [--minibatch 32] [--prompt 16] [--response 32]

One thread, a Llama of the demo's size, and Adam. A round is the update of one batch, in two epochs, as the policy's
learner does it: forward and backward pass, loss and optimizer step of each minibatch. Then comes for each correction
what a run with it computes in addition: the weights of each minibatch, and once the measures of the batch. (`dis` has
no weights; its loss takes the place of the other.) The rest of a run's step (sampling, scoring, the critic, the push)
is left out, so that a correction's part of a step is smaller than the one printed.
"""

import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Annotated, get_args

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from orchestrator.algorithm.loss import policy_loss
from orchestrator.algorithm.off_policy import Correction, correction_weights, measures

EPOCHS, VOCABULARY, CAP = 2, 106, 2.0
SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
console = Console()


class Update:
    """A policy, and a batch that it is trained on."""

    def __init__(self, batch: int, minibatch: int, prompt: int, response: int) -> None:
        torch.manual_seed(0)
        self._model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SHAPE))
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-5)
        self._minibatch, self._prompt = minibatch, prompt
        self._ids = torch.randint(VOCABULARY, (batch, prompt + response))
        self._advantages = torch.randn(batch, response)
        self._mask = torch.ones(batch, response, dtype=torch.bool)
        with torch.no_grad():
            self._old = self._logprobs(self._ids)
        self._behaviour = self._old + 0.3 * torch.randn_like(self._old)

    def carry_out(self) -> float:
        """Seconds of processor time of one round without a correction."""
        began = time.process_time()
        for rows in self._minibatches():
            new, tokens = self._logprobs(self._ids[rows]), float(self._mask[rows].sum())
            clipped = partial(policy_loss, clip_eps_low=0.2, clip_eps_high=0.2, dual_clip=None, denominator=tokens)
            loss = clipped(new, self._old[rows], self._advantages[rows], self._mask[rows], weights=None).loss
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        return time.process_time() - began

    def correct(self, correction: Correction) -> float:
        """Seconds of processor time that a correction adds to a round."""
        began = time.process_time()
        measures(correction, self._old, self._behaviour, self._mask, sampled=self._mask, cap=CAP, band=None)
        for rows in self._minibatches():
            mask = self._mask[rows]
            correction_weights(correction, self._old[rows], self._behaviour[rows], mask, sampled=mask, cap=CAP)
        return time.process_time() - began

    def _minibatches(self) -> Iterator[slice]:
        for _ in range(EPOCHS):
            for first in range(0, len(self._ids), self._minibatch):
                yield slice(first, first + self._minibatch)

    def _logprobs(self, ids: Tensor) -> Tensor:
        logits = self._model(ids).logits[:, self._prompt - 1 : -1]
        return logits.log_softmax(-1).gather(2, ids[:, self._prompt :, None])[..., 0]


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 20,
    batch: Annotated[int, typer.Option(min=1)] = 128,
    minibatch: Annotated[int, typer.Option(min=1)] = 32,
    prompt: Annotated[int, typer.Option(min=1)] = 16,
    response: Annotated[int, typer.Option(min=1)] = 32,
) -> None:
    """Runs the benchmark and prints its results."""
    torch.set_num_threads(1)
    update = Update(batch, minibatch, prompt, response)
    parts: dict[Correction, list[float]] = {kind: [] for kind in get_args(Correction)}
    for round_ in range(-1, rounds):
        whole = update.carry_out()
        for kind, taken in parts.items():
            part = update.correct(kind) / whole
            if round_ >= 0:
                taken.append(part)
    table = Table("correction", "of an update", "at most")
    for kind, taken in parts.items():
        table.add_row(kind, f"{median(taken):.2%}", f"{max(taken):.2%}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
