"""Client of the reward service. It needs neither Ray nor torch, and works without a training run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from protos import common_pb2
from protos import reward_pb2 as pb
from protos.reward_pb2_grpc import RewardStub
from quartet.columns import Columns
from quartet.wire.backoff import Deadline
from quartet.wire.client import ServiceClient
from quartet.wire.codec import Floats, unpack_floats
from quartet.wire.errors import InvalidArgument, InvalidReply
from quartet.wire.outcomes import Outcome, Unscored
from quartet.wire.pairs import SCORE
from quartet.wire.replies import one_each, reading
from quartet.wire.splitting import in_parts, some


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

    @property
    def values(self) -> Floats:
        """The scores, [B], of a scorer that gives one for each pair. ValueError names them if there are several."""
        if len(self.columns) > 1:
            raise ValueError(f"{self.scorer} gives {', '.join(self.columns)}; take one of `columns`")
        return next(iter(self.columns.values()))


class RewardClient(ServiceClient[RewardStub]):
    """Asks for the scores of pairs."""

    SERVICE = "reward"
    STUB = RewardStub

    async def score(
        self,
        trajectories: Columns,
        *,
        labels: Sequence[str] = (),
        ended: Sequence[bool] = (),
        timeout_s: float,
    ) -> Scores:
        """Scores of B trajectories in ids of the service's tokenizer. Large calls are sent in parts.

        Args:
            trajectories: prompts and responses (`Columns.of_pairs`); further columns stay here.
            labels: one per trajectory, or empty; passed to function scorers.
            ended: True for each response that is complete; empty: judged by the response's last token.
            timeout_s: deadline in seconds.

        Raises:
            ServiceError: the service's error; DeadlineExceeded after `timeout_s`; InvalidReply if the answer has
                another length, or its parts come from different scorers.
        """
        deadline, bare = Deadline(timeout_s), trajectories.select()

        def request(rows: range) -> pb.ScoreRequest:
            return pb.ScoreRequest(tokens=bare.take(rows).pack(), labels=some(labels, rows), ended=some(ended, rows))

        sizes = trajectories.lengths.tolist()
        return self._joined(await in_parts(sizes, lambda rows: self._part(rows, request(rows), deadline)))

    async def score_texts(
        self, prompts: Sequence[str], responses: Sequence[str], *, labels: Sequence[str] = (), timeout_s: float
    ) -> Scores:
        """Scores of pairs given as texts; all responses count as complete. Raises as `score` does."""
        if len(prompts) != len(responses):
            raise InvalidArgument(f"texts: {len(prompts)} prompts but {len(responses)} responses; send one for one")
        deadline = Deadline(timeout_s)

        def request(rows: range) -> pb.ScoreRequest:
            texts = pb.TextPairs(prompts=some(prompts, rows), responses=some(responses, rows))
            return pb.ScoreRequest(texts=texts, labels=some(labels, rows))

        # An English token has three bytes or more; in other scripts a letter may take several tokens.
        sizes = [1 + (len(a.encode()) + len(b.encode())) // 3 for a, b in zip(prompts, responses, strict=True)]
        return self._joined(await in_parts(sizes, lambda rows: self._part(rows, request(rows), deadline)))

    async def _part(self, rows: range, request: pb.ScoreRequest, deadline: Deadline) -> Scores:
        """The scores of these rows, which the request holds."""
        reply = await self._call(self._stub.Score, request, deadline, "Score", anywhere=True, divisible=len(rows) > 1)
        names = tuple(reply.scorer.names) or (SCORE,)
        of = "pairs" if len(names) == 1 else f"scores of {len(rows)} pairs by {len(names)} names"
        with reading(f"{self.application}.Score"):
            if len({*names}) < len(names):
                raise InvalidArgument(f"scorer.names: {', '.join(names)} has one twice")
            values = one_each(unpack_floats(reply.scores, "scores"), len(rows) * len(names), "scores", of)
            table = values.reshape(len(rows), len(names))
            unscored = _unscored(reply, table)
        columns = dict(zip(names, table.T, strict=True))
        return Scores(columns, reply.scorer.name, reply.scorer.model_hash, unscored)

    def _joined(self, parts: Sequence[Scores]) -> Scores:
        """The scores of all parts; InvalidReply if they come from different scorers."""
        first, scorers = parts[0], {(part.scorer, part.model_hash, *part.columns) for part in parts}
        if len(scorers) > 1:
            raise InvalidReply(
                f"{self.application}.Score: parts of one call were scored by {len(scorers)} scorers; is it being "
                "replaced?"
            )
        columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in first.columns}
        lengths = [len(next(iter(part.columns.values()))) for part in parts]
        starts = accumulate(lengths, initial=0)
        unscored = {
            start + row: each
            for start, part in zip(starts, parts, strict=False)
            for row, each in part.unscored.items()
        }
        return Scores(columns, first.scorer, first.model_hash, unscored)

    async def info(self, timeout_s: float) -> pb.RewardInfo:
        """The scorer behind the service."""
        info: pb.RewardInfo = await self._call(
            self._stub.Info, common_pb2.InfoRequest(), timeout_s, "Info", anywhere=True
        )
        return info


def _unscored(reply: pb.ScoreResponse, table: Floats) -> dict[int, Unscored]:
    """The pairs that the reply does not score. InvalidArgument unless exactly these have NaN in `table`, [B, K], in
    all columns, and each a reason."""
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
    return {row: Unscored(Outcome(outcomes[row]), why) for row, why in zip(rows, reply.reasons, strict=True)}
