"""Conversion of calls, given as ids or as text, to the inputs of scorers: pass by pass, never a whole call at
once."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos import reward_pb2 as pb
from quartet.columns import Columns
from quartet.wire.codec import Floats, Ints, check_length, pack_floats
from quartet.wire.errors import InvalidArgument
from quartet.wire.outcomes import Unscored
from quartet.wire.pairs import Pair
from services.reward.scorers.scorer import Result, Scored

NO_TEXT = Pair("", "")
"""Placeholder for the text of ids when no scorer reads texts."""
_MOST_COST = 1 << 30


class ScoreCall:
    """A batcher's view of one Score call: the costs of its rows, the scorers' inputs, and the scores."""

    def __init__(self, costs: NDArray[np.int32], items: Callable[[Sequence[int]], list[Scored]], each: int) -> None:
        """`each` is the number of scores of a row."""
        self.costs = costs
        self.items = items
        self.out: Floats = np.full((len(costs), each), np.nan, np.float32)
        """The scores, [B, K]; NaN for rows that are not scored."""
        self.unscored: dict[int, Unscored] = {}
        """Row -> the reason why it is not scored."""

    def put(self, rows: Sequence[int], results: Sequence[Result]) -> None:
        """Stores the results of these rows."""
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, Unscored):
                self.unscored[row] = result
            else:
                self.out[row] = result

    def response(self, scorer: pb.ScorerIdentity) -> pb.ScoreResponse:
        """The answer to the call."""
        outcomes = np.zeros(len(self.out), np.uint8)
        for row, each in self.unscored.items():
            outcomes[row] = each.outcome
        return pb.ScoreResponse(
            scores=pack_floats(self.out),
            scorer=scorer,
            outcomes=outcomes.tobytes() if self.unscored else b"",
            reasons=[self.unscored[row].reason for row in sorted(self.unscored)],
        )


class Received:
    """A Score request that has been counted but not decoded."""

    def __init__(self, request: pb.ScoreRequest) -> None:
        """Counts the rows. InvalidArgument if the request holds neither ids nor texts."""
        kind = request.WhichOneof("pairs")
        if kind is None:
            raise InvalidArgument("pairs: set tokens or texts")
        self.request = request
        self.field = str(kind)
        self.packed = request.tokens if kind == "tokens" else None
        self._tokens = 0
        if self.packed is None:
            pairs = max(len(request.texts.prompts), len(request.texts.responses))
        else:
            pairs, self._tokens = Columns.measure(self.packed, "tokens")
        self.rows = max(pairs, len(request.labels))
        """Number of pairs or of labels, the larger of the two."""

    def tokens(self) -> int:
        """Number of tokens; for texts and labels, bytes. Reads every text, so the number of rows is checked first."""
        labels = sum(map(_size, self.request.labels))
        if self.packed is not None:
            return self._tokens + labels
        texts = self.request.texts
        return sum(map(_size, texts.prompts)) + sum(map(_size, texts.responses)) + labels


class Encoder:
    """Turns ids into text and text into ids, by one tokenizer."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, max_length: int, *, texts: bool = True, each: int = 1
    ) -> None:
        """
        Args:
            tokenizer: the tokenizer of the requests' ids.
            vocab_size: upper limit of ids.
            max_length: most tokens of a pair.
            texts: True if a scorer reads the text of ids.
            each: number of scores of a pair.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._texts = texts
        self._each = each

    def call(self, received: Received) -> ScoreCall:
        """The request's pairs after all checks that need no tokenizer. InvalidArgument names the wrong field."""
        if received.packed is None:
            return self._of_texts(received.request)
        trajectories = Columns.received(
            received.packed, {}, vocab_size=self._vocab_size, max_length=self._max_length, field="tokens"
        )
        given = received.request
        _check_labels(given, len(trajectories))
        _check_ended(given, len(trajectories))
        return ScoreCall(trajectories.lengths, lambda rows: self._from_tokens(trajectories, given, rows), self._each)

    def _from_tokens(self, trajectories: Columns, given: pb.ScoreRequest, rows: Sequence[int]) -> list[Scored]:
        prompts, responses = trajectories.prompts, trajectories.responses
        asked, answers = [prompts[row] for row in rows], [responses[row] for row in rows]
        if not self._texts:
            return [Scored(p, r, NO_TEXT) for p, r in zip(asked, answers, strict=True)]
        texts = self._tokenizer.batch_decode([*asked, *answers], skip_special_tokens=True)
        eos, several = self._tokenizer.eos_token_id, not trajectories.single_turn
        pairs = zip(asked, answers, texts[: len(rows)], texts[len(rows) :], rows, strict=True)
        return [
            Scored(
                p,
                r,
                Pair(
                    prompt=pt,
                    response=rt,
                    label=given.labels[row] if given.labels else "",
                    ended=given.ended[row] if given.ended else bool(r[-1] == eos),
                    texts=self._parts(trajectories, row) if several else (),
                ),
            )
            for p, r, pt, rt, row in pairs
        ]

    def _parts(self, trajectories: Columns, row: int) -> tuple[str, ...]:
        """The texts of what follows the prompt, if it is more than a response."""
        segments = trajectories.segments(row)
        if len(segments) == 1:
            return ()
        return tuple(self._tokenizer.batch_decode(segments, skip_special_tokens=True))

    def _of_texts(self, request: pb.ScoreRequest) -> ScoreCall:
        prompts, responses = request.texts.prompts, request.texts.responses
        if not prompts:
            raise InvalidArgument("texts: empty; send at least one prompt and response")
        if len(prompts) != len(responses):
            raise InvalidArgument(f"texts: {len(prompts)} prompts but {len(responses)} responses; send one for one")
        _check_labels(request, len(prompts))
        # A text has at most one token per byte, plus a first and a last special token.
        costs = [min(_size(p) + _size(r) + 2, _MOST_COST) for p, r in zip(prompts, responses, strict=True)]
        return ScoreCall(np.asarray(costs, np.int32), lambda rows: self._from_texts(request, rows), self._each)

    def _from_texts(self, request: pb.ScoreRequest, rows: Sequence[int]) -> list[Scored]:
        prompts = [request.texts.prompts[row] for row in rows]
        responses = [request.texts.responses[row] for row in rows]
        eos = self._tokenizer.eos_token_id
        end = [] if eos is None else [eos]
        prompt_ids = [np.asarray(ids, np.int32) for ids in self._tokenizer(prompts)["input_ids"]]
        answers = self._tokenizer(responses, add_special_tokens=False)["input_ids"]
        response_ids = [np.asarray([*ids, *end], np.int32) for ids in answers]
        self._check_texts(prompt_ids, response_ids, rows)
        return [
            Scored(p, r, Pair(prompt=pt, response=rt, label=request.labels[row] if request.labels else ""))
            for p, r, pt, rt, row in zip(prompt_ids, response_ids, prompts, responses, rows, strict=True)
        ]

    def _check_texts(self, prompts: Sequence[Ints], responses: Sequence[Ints], rows: Sequence[int]) -> None:
        for name, sequences in (("prompts", prompts), ("responses", responses)):
            for row, ids in zip(rows, sequences, strict=True):
                if not len(ids):
                    raise InvalidArgument(f"texts.{name}[{row}]: has no tokens")
        for row, prompt, response in zip(rows, prompts, responses, strict=True):
            check_length(len(prompt), len(response), self._max_length, f"texts[{row}]")


def _size(text: str) -> int:
    """Upper bound of the bytes of a text, without encoding it."""
    return len(text) if text.isascii() else 4 * len(text)


def _check_ended(request: pb.ScoreRequest, pairs: int) -> None:
    if request.ended and len(request.ended) != pairs:
        raise InvalidArgument(f"ended: {len(request.ended)} for {pairs} pairs; send one each, or none")


def _check_labels(request: pb.ScoreRequest, pairs: int) -> None:
    if request.labels and len(request.labels) != pairs:
        raise InvalidArgument(f"labels: {len(request.labels)} for {pairs} pairs; send one each, or none")
