"""Client of the reward service. It needs neither Ray nor torch, and works without a training run."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from protos import common_pb2
from protos import reward_pb2 as pb
from protos.reward_pb2_grpc import RewardStub
from quartet.columns import Columns
from quartet.wire.backoff import Deadline
from quartet.wire.client import ServiceClient
from quartet.wire.codec import Floats, pack_longs, unpack_floats, unpack_longs
from quartet.wire.errors import InvalidArgument, InvalidReply, Unavailable
from quartet.wire.outcomes import Outcome, Unscored
from quartet.wire.pairs import SCORE
from quartet.wire.replies import one_each, reading
from quartet.wire.splitting import in_parts, some
from services.reward.names import chosen


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of scores that are earned within responses, in the order of their pairs; all [P]."""

    pairs: NDArray[np.int64]
    """Index of the pair."""
    places: NDArray[np.int64]
    """The place where it is earned, from 1 on: of trajectories the number of sampled tokens of the last sequence, up
    to the one that earns it; of texts the number of characters of the response."""
    rewards: Floats
    """The reward, which the pair's score holds."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores and the identity of their scorer."""

    columns: Mapping[str, Floats]
    """Name -> the scores of that name, [B] float32, NaN for a pair that is not scored; a scorer without names has
    one, `score`."""
    scorer: str
    """Name of the scorer, for instance "model:reward"."""
    model_hash: str
    """sha256 of the model's files or the function's source; scores with equal hashes can be compared."""
    unscored: Mapping[int, Unscored] = field(default_factory=dict)
    """Index of a pair -> the reason why it is not scored."""
    parts: Parts | None = None
    """The parts of the scores; None if all scores are earned at the end of the response."""

    @property
    def values(self) -> Floats:
        """The scores, [B], of a scorer that gives one for each pair. ValueError names them if there are several."""
        if len(self.columns) > 1:
            raise ValueError(f"{self.scorer} gives {', '.join(self.columns)}; take one of `columns`")
        return next(iter(self.columns.values()))


class Known(TypedDict, total=False):
    """Facts about the pairs of a call beside their texts, for scorers that ask for them (quartet/wire/pairs.py):
    one for each pair, or left out."""

    labels: Sequence[str]
    """Texts that responses are compared with."""
    ended: Sequence[bool]
    """True for each response that is complete."""
    columns: Sequence[Mapping[str, Any]]
    """The other columns of each pair's row, values of JSON."""
    groups: Sequence[int]
    """Number of each pair's prompt, the same for all responses to one prompt, in all calls of a caller under one
    name and for one purpose."""
    pair_timeout_s: float
    """Longest time that the scorer should spend on a pair, in seconds, 0.05 or more; left out, or 0: what the scorer
    allows."""


class RewardClient(ServiceClient[RewardStub]):
    """Asks for the scores of pairs."""

    SERVICE = "reward"
    STUB = RewardStub
    scorer = ""
    """Name of the scorer that is asked; empty: the only one of the service."""

    def named(self, scorer: str) -> Self:
        """A copy of this client, on the same channel, that asks the scorer of this name."""
        other = copy.copy(self)
        other.scorer = scorer
        return other

    async def score(self, trajectories: Columns, *, timeout_s: float, **known: Unpack[Known]) -> Scores:
        """Scores of B trajectories in ids of the service's tokenizer. Large calls are sent in parts.

        Args:
            trajectories: prompts and responses (`Columns.of_pairs`); further columns stay here.
            timeout_s: deadline in seconds.
            known: what is known of the trajectories; without `ended` a response's last token says if it is complete.

        Raises:
            ServiceError: the service's error; DeadlineExceeded after `timeout_s`; InvalidReply if the answer has
                another length, or its parts come from different scorers.
        """
        bare = trajectories.select()

        def request(rows: range) -> pb.ScoreRequest:
            return pb.ScoreRequest(tokens=bare.take(rows).pack())

        return await self._scored(trajectories.lengths.tolist(), request, known, timeout_s)

    async def score_texts(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        *,
        timeout_s: float,
        **known: Unpack[Known],
    ) -> Scores:
        """Scores of pairs given as texts. Responses count as complete unless `ended`, [B], says otherwise. Raises as
        `score` does."""
        if len(prompts) != len(responses):
            raise InvalidArgument(f"texts: {len(prompts)} prompts but {len(responses)} responses; send one for one")

        def request(rows: range) -> pb.ScoreRequest:
            texts = pb.TextPairs(prompts=some(prompts, rows), responses=some(responses, rows))
            return pb.ScoreRequest(texts=texts)

        sizes = [_tokens(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        return await self._scored(sizes, request, known, timeout_s)

    async def score_conversations(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        *,
        timeout_s: float,
        **known: Unpack[Known],
    ) -> Scores:
        """Scores of conversations: chat messages with `role` and `content`, of which the last one is the response, of
        role assistant. The scorer renders them by its own chat template; `ended`, [B], is as of `score_texts`, for
        functions. Raises as `score` does."""
        texts = [json.dumps(messages) for messages in conversations]

        def request(rows: range) -> pb.ScoreRequest:
            return pb.ScoreRequest(conversations=pb.Conversations(messages=some(texts, rows)))

        return await self._scored([*map(_tokens, texts)], request, known, timeout_s)

    async def _scored(
        self, sizes: Sequence[int], request: Callable[[range], pb.ScoreRequest], known: Known, timeout_s: float
    ) -> Scores:
        """The scores of rows of these sizes in tokens, by requests that hold the pairs of some of them."""
        deadline = Deadline(timeout_s)

        async def part(rows: range) -> Scores:
            made = request(rows)
            made.scorer = self.scorer
            _tell(made, rows, **known)
            return await self._part(rows, made, deadline)

        return self._joined(await in_parts(sizes, part))

    async def _part(self, rows: range, request: pb.ScoreRequest, deadline: Deadline) -> Scores:
        """The scores of these rows of the call, which the request holds."""
        reply = await self._call(self._stub.Score, request, deadline, "Score", anywhere=True, divisible=len(rows) > 1)
        names = tuple(reply.scorer.names) or (SCORE,)
        of = "pairs" if len(names) == 1 else f"scores of {len(rows)} pairs by {len(names)} names"
        with reading(f"{self.application}.Score"):
            if len({*names}) < len(names):
                raise InvalidArgument(f"scorer.names: {', '.join(names)} has one twice")
            values = one_each(unpack_floats(reply.scores, "scores"), len(rows) * len(names), "scores", of)
            table = values.reshape(len(rows), len(names))
            unscored = _unscored(reply, table, names, rows)
            parts = _parts(reply, rows) if reply.scorer.process else None
        columns = dict(zip(names, table.T, strict=True))
        return Scores(columns, reply.scorer.name, reply.scorer.model_hash, unscored, parts)

    def _joined(self, parts: Sequence[Scores]) -> Scores:
        """The scores of all parts; InvalidReply if they come from different scorers."""
        first = parts[0]
        scorers = {(part.scorer, part.model_hash, part.parts is None, *part.columns) for part in parts}
        if len(scorers) > 1:
            raise InvalidReply(
                f"{self.application}.Score: parts of one call were scored by {len(scorers)} scorers; is it being "
                "replaced?"
            )
        columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in first.columns}
        unscored = {row: each for part in parts for row, each in part.unscored.items()}
        whole = None
        if earned := [part.parts for part in parts if part.parts is not None]:
            whole = Parts(
                np.concatenate([each.pairs for each in earned]),
                np.concatenate([each.places for each in earned]),
                np.concatenate([each.rewards for each in earned]),
            )
        return Scores(columns, first.scorer, first.model_hash, unscored, whole)

    async def info(self, timeout_s: float) -> pb.ScorerInfo:
        """The scorer that is asked.

        Raises:
            InvalidArgument: there is none of its name, or several and it has no name; names those that there are.
            Unavailable: it has not started yet.
        """
        scorers = {each.name: each for each in await self.scorers(timeout_s)}
        try:
            found = scorers[chosen(self.scorer, scorers)]
        except InvalidArgument as error:
            raise InvalidArgument(f"{self.application}.Info: {error}") from None
        if not found.identity.name:
            raise Unavailable(f"{self.application}.Info: scorer {found.name} has not started yet")
        return found

    async def scorers(self, timeout_s: float) -> Sequence[pb.ScorerInfo]:
        """All scorers of the service, one or more; those that have not started yet have a name alone."""
        reply: pb.RewardInfo = await self._call(
            self._stub.Info, common_pb2.InfoRequest(), timeout_s, "Info", anywhere=True
        )
        if not reply.scorers:
            raise InvalidReply(f"{self.application}.Info: scorers: empty; there must be one or more")
        return reply.scorers


def _tell(
    request: pb.ScoreRequest,
    rows: range,
    labels: Sequence[str] = (),
    ended: Sequence[bool] = (),
    columns: Sequence[Mapping[str, Any]] = (),
    groups: Sequence[int] = (),
    pair_timeout_s: float = 0.0,
) -> None:
    """Adds to a request what is known of its pairs, which are these rows."""
    request.labels.extend(some(labels, rows))
    request.ended.extend(some(ended, rows))
    request.columns.extend(map(json.dumps, some(columns, rows)))
    request.groups = pack_longs(some(groups, rows))
    request.pair_timeout_s = pair_timeout_s


def _tokens(*texts: str) -> int:
    # An English token has three bytes or more; in other scripts a letter may take several tokens.
    return 1 + sum(len(text.encode()) for text in texts) // 3


def _parts(reply: pb.ScoreResponse, pairs: range) -> Parts:
    """The parts of the scores of these pairs of the call. InvalidArgument unless each has a pair, a place and a
    finite reward."""
    owners, places = unpack_longs(reply.part_pairs, "part_pairs"), unpack_longs(reply.part_places, "part_places")
    rewards = unpack_floats(reply.part_rewards, "part_rewards")
    if not len(owners) == len(places) == len(rewards):
        raise InvalidArgument(f"part_places: {len(places)}, part_rewards: {len(rewards)}, but {len(owners)} pairs")
    if len(owners) and (owners[0] < 0 or owners[-1] >= len(pairs) or (owners[1:] < owners[:-1]).any()):
        raise InvalidArgument(f"part_pairs: must be ascending, from 0 to {len(pairs) - 1}")
    if not ((places > 0).all() and np.isfinite(rewards).all()):
        raise InvalidArgument("part_places and part_rewards: must be from 1 on, and finite")
    return Parts(owners + pairs.start, places, rewards)


def _unscored(reply: pb.ScoreResponse, table: Floats, names: Sequence[str], pairs: range) -> dict[int, Unscored]:
    """The unscored ones of these pairs of the call. InvalidArgument unless those have NaN in all columns of `table`,
    [B, K], which have these names, and each a reason, and all others have numbers."""
    outcomes = np.frombuffer(reply.outcomes, np.uint8) if reply.outcomes else np.zeros(len(table), np.uint8)
    if len(outcomes) != len(table):
        raise InvalidArgument(f"outcomes: {len(outcomes)} for {len(table)} pairs; there must be one each, or none")
    if len(outcomes) and int(outcomes.max()) > max(Outcome):
        raise InvalidArgument(f"outcomes[{int(outcomes.argmax())}]: {outcomes.max()} is no outcome")
    rows = np.flatnonzero(outcomes).tolist()
    if len(reply.reasons) != len(rows):
        raise InvalidArgument(f"reasons: {len(reply.reasons)} for {len(rows)} pairs without a score; one each")
    if not np.isnan(table[rows]).all():
        raise InvalidArgument("scores: a number for a pair that is not scored; must be NaN")
    wrong = ~np.isfinite(table) & (outcomes == Outcome.SCORED)[:, None]
    if wrong.any():
        row, column = divmod(int(np.argmax(wrong)), len(names))
        where = f"scores: {names[column]} of pair {pairs[row]} of the call"
        raise InvalidArgument(f"{where} is {table[row, column]}; must be finite")
    return {pairs[row]: Unscored(Outcome(outcomes[row]), why) for row, why in zip(rows, reply.reasons, strict=True)}
