"""Requests of the reward service, given as ids or as text, as what scorers take."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from protos import reward_pb2 as pb
from services.common.arrays import check_lengths, unpack_pairs
from services.common.errors import InvalidArgument
from services.common.pairs import Pair
from services.reward.scorers import Scored


class Encoder:
    """Turns ids into text and text into ids, by one tokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_length = max_length

    def decode(self, request: pb.ScoreRequest) -> list[Scored]:
        """The request's pairs. InvalidArgument names what is wrong with them."""
        kind = request.WhichOneof("pairs")
        if kind is None:
            raise InvalidArgument("pairs: set tokens or texts")
        scored = self._from_tokens(request) if kind == "tokens" else self._from_texts(request)
        return scored

    def _from_tokens(self, request: pb.ScoreRequest) -> list[Scored]:
        prompts, responses = unpack_pairs(
            request.tokens, vocab_size=self._vocab_size, max_length=self._max_length, field="tokens"
        )
        labels = _labels(request, len(prompts))
        texts = self._tokenizer.batch_decode([*prompts, *responses], skip_special_tokens=True)
        eos = self._tokenizer.eos_token_id
        return [
            Scored(p, r, Pair(prompt=pt, response=rt, label=label, ended=bool(r[-1] == eos)))
            for p, r, pt, rt, label in zip(
                prompts, responses, texts[: len(prompts)], texts[len(prompts) :], labels, strict=True
            )
        ]

    def _from_texts(self, request: pb.ScoreRequest) -> list[Scored]:
        prompts, responses = list(request.texts.prompts), list(request.texts.responses)
        if not prompts:
            raise InvalidArgument("texts: empty; send at least one prompt and response")
        if len(prompts) != len(responses):
            raise InvalidArgument(f"texts: {len(prompts)} prompts but {len(responses)} responses; send one for one")
        labels = _labels(request, len(prompts))
        prompt_ids = [np.asarray(ids, np.int32) for ids in self._tokenizer(prompts)["input_ids"]]
        eos = self._tokenizer.eos_token_id
        end = [] if eos is None else [eos]
        response_ids = [
            np.asarray([*ids, *end], np.int32)
            for ids in self._tokenizer(responses, add_special_tokens=False)["input_ids"]
        ]
        for name, sequences in (("prompts", prompt_ids), ("responses", response_ids)):
            for index, ids in enumerate(sequences):
                if not len(ids):
                    raise InvalidArgument(f"texts.{name}[{index}]: has no tokens")
        check_lengths(prompt_ids, response_ids, self._max_length, "texts")
        return [
            Scored(p, r, Pair(prompt=pt, response=rt, label=label))
            for p, r, pt, rt, label in zip(prompt_ids, response_ids, prompts, responses, labels, strict=True)
        ]


def _labels(request: pb.ScoreRequest, pairs: int) -> Sequence[str]:
    if request.labels and len(request.labels) != pairs:
        raise InvalidArgument(f"labels: {len(request.labels)} for {pairs} pairs; send one each, or none")
    return list(request.labels) or [""] * pairs
