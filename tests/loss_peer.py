"""TRL's loss of GRPOTrainer on given numbers. Runs in the virtual environment that holds TRL, and imports nothing of
Quartet.

    python loss_peer.py < CASES

CASES is JSON: a list of `new`, `old_logprobs`, `ref_logprobs`, `advantages` and `trained`, of B responses of T tokens
each, with the names of TRL's settings and their values in `settings`. Prints for each case a line of JSON: the loss,
and its gradient by the log-probs `new`, token by token.
"""

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

DEFAULTS: dict[str, Any] = {
    "aux_loss_enabled": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "importance_sampling_level": "token",
    "beta": 0.0,
    "loss_type": "grpo",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "max_completion_length": 1,
    "current_gradient_accumulation_steps": 1,
    "_entropy_bonus_enabled": False,
}
ARGUMENTS: dict[str, Any] = {"use_bias_correction_kl": False, "delta": None, "steps_per_generation": 1}


def padded(rows: list[list[float]]) -> Tensor:
    """[B, T], zero where a row has ended."""
    made = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.float64)
    for index, row in enumerate(rows):
        made[index, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return made


def computed(case: dict[str, Any]) -> dict[str, Any]:
    """The loss of a case and its gradient, by GRPOTrainer._compute_loss."""
    new, mask = padded(case["new"]).requires_grad_(), padded(case["trained"])
    given = case["settings"]
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    trainer = SimpleNamespace(
        **{name: given.get(name, value) for name, value in DEFAULTS.items()},
        args=SimpleNamespace(**{name: given.get(name, value) for name, value in ARGUMENTS.items()}),
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
    )
    ids = torch.zeros(new.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": padded(case["advantages"])[:, 0],
        "old_per_token_logps": padded(case["old_logprobs"]),
        "ref_per_token_logps": padded(case["ref_logprobs"]),
        "num_items_in_batch": mask.sum(),
    }
    if trainer.use_vllm:
        inputs["importance_sampling_ratio"] = padded(case["weights"])
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(loss, new)
    each = [gradient[index, : len(row)].tolist() for index, row in enumerate(case["new"])]
    return {"loss": float(loss.detach()), "gradient": [value for row in each for value in row]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for one in json.load(sys.stdin):
        print(json.dumps(computed(one)), flush=True)
