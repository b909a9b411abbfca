"""Supervised fine-tuning of a policy on prompts and responses."""

from collections.abc import Iterable, Sequence

from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from quartet.wire.pairs import Pair
from recipes.common.batch import pad_right
from recipes.common.sampling import EncodedPair, encode
from recipes.common.schedule import Schedule
from recipes.common.training import fit

IGNORED = -100
"""Label of a token that the loss leaves out, by transformers' convention."""


def labels_of(samples: Sequence[EncodedPair], ids: Tensor, mask: Tensor) -> Tensor:
    """Training labels [N, T] for right-padded ids [N, T]: the response's tokens, and IGNORED elsewhere."""
    labels = ids.masked_fill(mask == 0, IGNORED)
    for row, sample in enumerate(samples):
        labels[row, : len(sample.prompt_ids)] = IGNORED
    return labels


def fine_tune(
    policy: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    batches: Iterable[Sequence[Pair]],
    schedule: Schedule,
) -> float:
    """Trains `policy` to respond as the pairs do, one update per batch of pairs; returns the last loss."""

    def loss_of(pairs: Sequence[Pair]) -> Tensor:
        samples = encode(pairs, tokenizer)
        ids, mask = pad_right([sample.ids for sample in samples])
        loss: Tensor = policy(input_ids=ids, attention_mask=mask, labels=labels_of(samples, ids, mask)).loss
        return loss

    return fit(policy, batches, loss_of, schedule)
