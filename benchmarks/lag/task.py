"""Responses of the right length: a task whose reward falls on both sides of its optimum."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quartet.wire.codec import Floats, Ints
from services.rollout.sample import FinishReason, Sample

VOCABULARY, END = 32, 2
PROMPTS = range(4, 12)
"""Tokens, each of which is a whole prompt."""
MOST, WANTED = 16, 6
"""Tokens of the longest response, and of the best one, its end token included."""
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": END,
}


def make_model(folder: Path, seed: int) -> Path:
    """Writes a Llama with random weights, all of whose tokens are about equally likely; returns `folder`."""
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
    return folder


def score(length: int) -> float:
    """1 for a response of WANTED tokens, and less by an equal amount for each token more or less."""
    return 1 - abs(length - WANTED) / WANTED


@torch.no_grad()
def sample(
    model: LlamaForCausalLM, prompts: Sequence[Ints], version: int, generator: torch.Generator
) -> list[Sample]:
    """Samples a response to each prompt, with the log-probs that `model` gives to its tokens."""
    ids, chosen, logprobs, cache = torch.from_numpy(np.stack(prompts)).long(), [], [], None
    for _ in range(MOST):
        output = model(ids, past_key_values=cache, use_cache=True)
        every, cache = output.logits[:, -1].log_softmax(-1), output.past_key_values
        ids = torch.multinomial(every.exp(), 1, generator=generator)
        chosen.append(ids)
        logprobs.append(every.gather(1, ids))
    rows, columns = torch.cat(chosen, 1).numpy().astype(np.int32), torch.cat(logprobs, 1).numpy()
    return [_cut(index, rows[index], columns[index], version) for index in range(len(rows))]


def _cut(index: int, ids: Ints, logprobs: Floats, version: int) -> Sample:
    """The response up to its end token."""
    ends = np.flatnonzero(ids == END)
    length = int(ends[0]) + 1 if len(ends) else MOST
    reason = FinishReason.STOP if len(ends) else FinishReason.LENGTH
    return Sample(index, ids[:length], logprobs[:length], reason, ((version, 0, length),))
