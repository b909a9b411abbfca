"""Client of the reward service. It needs neither Ray nor torch, and works without a training run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from protos import common_pb2
from protos import reward_pb2 as pb
from protos.reward_pb2_grpc import RewardStub
from quartet.columns import Columns
from quartet.wire.backoff import Deadline
from quartet.wire.client import ServiceClient
from quartet.wire.codec import Floats, unpack_floats
from quartet.wire.errors import InvalidArgument, InvalidReply
from quartet.wire.pairs import SCORE
from quartet.wire.replies import one_each, reading
from quartet.wire.splitting import in_parts, some


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores and the identity of their scorer."""

    columns: Mapping[str, Floats]
    """Name -> the scores of that name, [B] float32; a scorer without names has one, `score`."""
    scorer: str
    """Name of the scorer, for instance "model:reward"."""
    model_hash: str
    """sha256 of the model's files or the function's source; scores with equal hashes can be compared."""

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

        bare = trajectories.select()

        def request(rows: range) -> pb.ScoreRequest:
            return pb.ScoreRequest(tokens=bare.take(rows).pack(), labels=some(labels, rows), ended=some(ended, rows))

        return await self._score(trajectories.lengths.tolist(), request, timeout_s)

    async def score_texts(
        self, prompts: Sequence[str], responses: Sequence[str], *, labels: Sequence[str] = (), timeout_s: float
    ) -> Scores:
        """Scores of pairs given as texts; all responses count as complete. Raises as `score` does."""
        if len(prompts) != len(responses):
            raise InvalidArgument(f"texts: {len(prompts)} prompts but {len(responses)} responses; send one for one")

        def request(rows: range) -> pb.ScoreRequest:
            texts = pb.TextPairs(prompts=some(prompts, rows), responses=some(responses, rows))
            return pb.ScoreRequest(texts=texts, labels=some(labels, rows))

        # An English token has three bytes or more; in other scripts a letter may take several tokens.
        sizes = [len(a.encode()) + len(b.encode()) for a, b in zip(prompts, responses, strict=True)]
        return await self._score([1 + size // 3 for size in sizes], request, timeout_s)

    async def _score(
        self, sizes: Sequence[int], request: Callable[[range], pb.ScoreRequest], timeout_s: float
    ) -> Scores:
        deadline = Deadline(timeout_s)
        call = f"{self.application}.Score"

        async def ask(rows: range) -> Scores:
            divisible = len(rows) > 1
            reply = await self._call(
                self._stub.Score, request(rows), deadline, "Score", anywhere=True, divisible=divisible
            )
            names = tuple(reply.scorer.names) or (SCORE,)
            of = "pairs" if len(names) == 1 else f"scores of {len(rows)} pairs by {len(names)} names"
            with reading(call):
                if len({*names}) < len(names):
                    raise InvalidArgument(f"scorer.names: {', '.join(names)} has one twice")
                values = one_each(unpack_floats(reply.scores, "scores"), len(rows) * len(names), "scores", of)
            table = values.reshape(len(rows), len(names))
            return Scores(dict(zip(names, table.T, strict=True)), reply.scorer.name, reply.scorer.model_hash)

        parts = await in_parts(sizes, ask)
        first, scorers = parts[0], {(part.scorer, part.model_hash, *part.columns) for part in parts}
        if len(scorers) > 1:
            raise InvalidReply(
                f"{call}: parts of one call were scored by {len(scorers)} scorers; is it being replaced?"
            )
        columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in first.columns}
        return Scores(columns, first.scorer, first.model_hash)

    async def info(self, timeout_s: float) -> pb.RewardInfo:
        """The scorer behind the service."""
        info: pb.RewardInfo = await self._call(
            self._stub.Info, common_pb2.InfoRequest(), timeout_s, "Info", anywhere=True
        )
        return info
