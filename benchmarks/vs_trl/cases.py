"""Cases of the race: models, prompts, lengths and batches, the same for both sides."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from recipes.common.tokenizer import BOS_ID, EOS_ID, PAD_ID, word_tokenizer

RATE = 1e-7
"""Learning rate of both sides: so small that lengths stay as they are."""


@dataclass(frozen=True, slots=True)
class Case:
    """One race."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    prompt: int
    """Tokens of every prompt."""
    response: int
    """Tokens of every response, or of the longest."""
    epochs: int
    minibatches: int
    algorithm: Literal["ppo", "grpo"] = "ppo"
    each: int = 1
    """Responses to each prompt."""
    equal: bool = True
    """All responses have the same length; else they end by themselves."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Quartet's. TRL computes in float32: its bfloat16 is autocast, which no CPU gains by."""
    old_logprobs: Literal["learner", "rollout"] = "rollout"
    """Quartet's. TRL's PPO takes the ratio to the log-probs of generation, as `rollout` does; GRPO as `learner`."""

    @property
    def longest(self) -> int:
        """Tokens that the models take."""
        return self.prompt + self.response

    def make(self, folder: Path) -> None:
        """Writes `policy`, `reward` and `prompts.jsonl`: random weights, random words."""
        words = [f"w{index}" for index in range(self.vocabulary - 4)]
        torch.manual_seed(0)
        policy = LlamaForCausalLM(LlamaConfig(**self.shape()))
        policy.generation_config = GenerationConfig(pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID)
        reward = LlamaForSequenceClassification(LlamaConfig(**self.shape(), num_labels=1))
        for name, model in (("policy", policy), ("reward", reward)):
            model.save_pretrained(folder / name)
            word_tokenizer(words, self.longest).save_pretrained(folder / name)
        rows = torch.randint(
            len(words), (4 * self.batch, self.prompt - 1), generator=torch.Generator().manual_seed(1)
        )
        texts = [" ".join(words[index] for index in row) for row in rows.tolist()]
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))

    def shape(self) -> dict[str, Any]:
        """Sizes of both models as arguments of LlamaConfig."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "max_position_embeddings": self.longest + 8,
            "tie_word_embeddings": False,
            "pad_token_id": PAD_ID,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
        }


_LARGE = Case(512, 6, 8, 1024, batch=32, prompt=12, response=96, epochs=1, minibatches=4)
_UNEVEN = replace(_LARGE, vocabulary=32, batch=64, response=128, equal=False)
_GRPO: dict[str, Any] = {"algorithm": "grpo", "each": 8, "old_logprobs": "learner"}
CASES = {
    "demo": Case(128, 2, 4, 106, batch=64, prompt=16, response=32, epochs=4, minibatches=4),
    "20M": _LARGE,
    "20M-bf16": replace(_LARGE, dtype="bfloat16", old_logprobs="learner"),
    "20M-bf16-rollout": replace(_LARGE, dtype="bfloat16"),
    "20M-uneven": _UNEVEN,
    "grpo": replace(_UNEVEN, hidden=128, layers=2, heads=4, **_GRPO),
    "20M-grpo": replace(_UNEVEN, **_GRPO),
}
"""Cases by name."""
