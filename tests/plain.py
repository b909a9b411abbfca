"""Answers to compare with, by plain transformers: one sequence at a time, without padding."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from quartet.wire.codec import Floats, Ints
from tests.models import REWARD_MEAN, REWARD_STD, WORDS


def random_pairs(count: int, seed: int = 0, longest: int = 40) -> tuple[list[Ints], list[Ints]]:
    """Prompts and responses of 1 to `longest` random ids, special tokens among them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, (2, count))
    prompts, responses = ([rng.integers(0, len(WORDS), n).astype(np.int32) for n in row] for row in lengths)
    return prompts, responses


def language_model(folder: Path | str) -> Any:
    """The causal model in `folder`, in float32, with plain attention: the fused kernel leaves out soft-capping."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def logprobs(
    model: Any,
    prompts: Sequence[Ints],
    responses: Sequence[Ints],
    temperature: float = 1.0,
    vocabulary: int | None = None,
) -> list[Floats]:
    """Log softmax(logits / temperature) at each response token; [T] for each pair. Only the first
    `vocabulary` logits count; None for all."""
    answers = []
    for prompt, response in zip(prompts, responses, strict=True):
        logits = model(_row(prompt, response)).logits[0, len(prompt) - 1 : -1]
        every = (logits[:, :vocabulary] / temperature).log_softmax(-1).numpy()
        answers.append(every[np.arange(len(response)), response])
    return answers


@torch.inference_mode()
def shortfall(model: Any, prompts: Sequence[Ints], responses: Sequence[Ints], max_new_tokens: int) -> float:
    """The most by which the logit of a response's token lies below the largest at its place: 0 for greedy responses.

    Not compared token by token, since two logits that differ by rounding alone may be ordered either way, after which
    the whole texts differ. Padding of the vocabulary does not count. Infinite if a response is cut before the end of
    its text and `max_new_tokens`, or goes on after one of them.
    """
    ends = torch.tensor(model.generation_config.eos_token_id).flatten()
    worst = 0.0
    for prompt, response in zip(prompts, responses, strict=True):
        ended = np.isin(response, ends)
        if ended[:-1].any() or not (ended[-1] or len(response) == max_new_tokens):
            return float("inf")
        logits = model(_row(prompt, response)).logits[0, len(prompt) - 1 : -1, : len(WORDS)].numpy()
        worst = max(worst, float((logits.max(-1) - logits[np.arange(len(response)), response]).max()))
    return worst


@torch.inference_mode()
def scores(folder: Path, prompts: Sequence[Ints], responses: Sequence[Ints]) -> Floats:
    """[B]: the reward model's head at the last token, normalised."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    pairs = zip(prompts, responses, strict=True)
    raw = [float(model.score(model.model(_row(*pair)).last_hidden_state[0, -1])) for pair in pairs]
    return (np.asarray(raw, np.float32) - REWARD_MEAN) / REWARD_STD


@torch.inference_mode()
def values(folder: Path | str, prompts: Sequence[Ints], responses: Sequence[Ints]) -> list[Floats]:
    """Values by a saved critic: its head at the token before each response token; [T] for each pair."""
    body = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    head = load_file(Path(folder) / "value_head.safetensors")
    answers = []
    for prompt, response in zip(prompts, responses, strict=True):
        hidden = body(_row(prompt, response)).last_hidden_state[0, len(prompt) - 1 : -1]
        answers.append((hidden @ head["value_head.weight"][0] + head["value_head.bias"]).numpy())
    return answers


def _row(*parts: Ints) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts))[None].long()


def furthest(left: Any, right: Any) -> float:
    """Largest absolute difference between two rows or two dicts of arrays; infinite where one is not finite."""
    if isinstance(right, dict):
        assert list(left) == list(right)
        left, right = left.values(), right.values()
    pairs = list(zip(left, right, strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float(np.nan_to_num(np.abs(a - b), nan=np.inf, posinf=np.inf).max(initial=0)) for a, b in pairs)


def product(layer: Any, remove_weight: bool) -> None:
    """Has a layer of vLLM's CPU build compute with its weights as they are, in place of packed copies of them."""
    layer.cpu_linear = torch.nn.functional.linear
