"""Responses drawn from a policy in process, without a server."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from quartet.wire.codec import Ints
from quartet.wire.pairs import Pair
from recipes.common.tokenizer import EOS_ID, SPECIALS


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPair:
    """A pair as text and as tokens."""

    pair: Pair
    prompt_ids: Ints
    """The prompt's tokens, `<bos>` first."""
    response_ids: Ints
    """The response's tokens; `<eos>` is the last one if the response ended."""

    @property
    def written(self) -> str:
        """The response as text, with `<eos>` where it ended."""
        return f"{self.pair.response} {SPECIALS[EOS_ID]}" if self.pair.ended else self.pair.response


def encode(pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerFast) -> list[EncodedPair]:
    """The tokens of pairs whose responses were written rather than sampled."""
    prompts = tokenizer([pair.prompt for pair in pairs]).input_ids
    responses = tokenizer([pair.response for pair in pairs], add_special_tokens=False).input_ids
    return [
        EncodedPair(pair, _array(prompt_ids), _array(response_ids + [EOS_ID] * pair.ended))
        for pair, prompt_ids, response_ids in zip(pairs, prompts, responses, strict=True)
    ]


def sample(
    policy: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    max_new_tokens: int,
    batch_size: int = 512,
) -> list[EncodedPair]:
    """One response per prompt, in order, at temperature 1 from the whole distribution (torch's generator)."""
    samples: list[EncodedPair] = []
    for start in range(0, len(prompts), batch_size):
        texts = list(prompts[start : start + batch_size])
        prompt_ids = tokenizer(texts).input_ids
        inputs = tokenizer.pad({"input_ids": prompt_ids}, return_tensors="pt")
        outputs = policy.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=max_new_tokens)
        for text, ids, row in zip(texts, prompt_ids, outputs.tolist(), strict=True):
            response_ids = _finished(row[inputs.input_ids.shape[1] :])
            response = tokenizer.decode(response_ids, skip_special_tokens=True)
            pair = Pair(text, response, ended=EOS_ID in response_ids)
            samples.append(EncodedPair(pair, _array(ids), _array(response_ids)))
    return samples


def _array(ids: Sequence[int]) -> Ints:
    return np.asarray(ids, np.int32)


def _finished(row: list[int]) -> list[int]:
    """The tokens up to the first `<eos>`; what follows is padding."""
    return row[: row.index(EOS_ID) + 1] if EOS_ID in row else row
