"""The four replicas as they are, made by their own constructors, around models that sleep. `args:` of each hold
`service`; `pace`, the file of a Pace; `batch`, the number of responses in a batch; and `folder`, with a tokenizer."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ray import serve

from benchmarks.emulated.pace import CHECKSUM, PROMPT, RESPONSE, VOCABULARY, Pace
from protos import reward_pb2
from quartet.columns import Columns
from quartet.models.distribution import Distribution
from quartet.ranks.group import RankGroup
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.place import Place
from quartet.wire.codec import Floats, Ints
from services.critic.config import CriticConfig
from services.critic.replica import Critic
from services.critic.trainer import CriticTrainer
from services.reference.config import ReferenceConfig
from services.reference.model import Frozen
from services.reference.replica import Reference
from services.reward.config import Hosted
from services.reward.kinds import FunctionScorerConfig
from services.reward.replica import Reward
from services.reward.scorers.scorer import EncodedPair, Result, Scorer
from services.rollout.config import RolloutConfig
from services.rollout.interface import Engine
from services.rollout.replica import Rollout
from services.rollout.sample import FinishReason, Sample, Sampling

LONGEST = 256


@dataclass(frozen=True, slots=True)
class Sleep:
    """Sleeps for as long as a part takes by the present pace."""

    file: Path
    """File of the Pace, which is read at each use."""
    batch: int
    """Responses in a batch."""

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.batch * (PROMPT + RESPONSE)

    def seconds(self, part: str, rows: int | None = None) -> float:
        """The time of a whole batch, or of so many rows' share of it."""
        share = 1.0 if rows is None else rows / self.batch
        return share * float(getattr(Pace.read(self.file), part))


class EmulatedEngine:
    """An engine that takes its time for each response, with room for one batch."""

    backend, workers, place = "gloo", 1, Place()
    vocab_size, max_length, longest_manifest = VOCABULARY, LONGEST, 1 << 20
    end_ids: tuple[int, ...] = ()

    def __init__(self, sleep: Sleep, tokenizer: Any) -> None:
        self.version, self.checksum = 0, ""
        self.checksums: dict[int, str] = {}
        self.tokenizer = tokenizer
        self._sleep, self._room = sleep, asyncio.Semaphore(sleep.batch)
        self._running = 0

    async def generate(
        self,
        index: int,
        prompt_ids: Ints,
        sampling: Sampling,
        seed: int | None,
        begun: Ints | None = None,
        report: Callable[[Sample], None] = lambda part: None,
    ) -> Sample:
        """A response, the halves of which were sampled by the versions at its beginning and at its end."""
        self._running += 1
        try:
            async with self._room:
                first = self.version
                await asyncio.sleep(self._sleep.seconds("generate"))
        finally:
            self._running -= 1
        spans: tuple[tuple[int, int, int], ...] = ((first, 0, RESPONSE),)
        if self.version != first:
            spans = ((first, 0, RESPONSE // 2), (self.version, RESPONSE // 2, RESPONSE))
        ids = np.full(RESPONSE, 4 + (seed or 0) % 60, np.int32)
        return Sample(index, ids, np.full(RESPONSE, -1.0, np.float32), FinishReason.LENGTH, spans)

    def running(self) -> int:
        """Unfinished requests."""
        return self._running

    async def answer(self) -> None:
        """Answers at once."""

    async def check_health(self) -> None:
        """Finds nothing wrong."""

    def check(self, manifest: Manifest) -> None:
        """Takes any weights."""

    async def join(self, init_info: dict[str, Any]) -> None:
        """Joins no group."""

    async def leave(self) -> None:
        """Is in no group."""

    async def rest(self) -> None:
        """Has no memory to release."""

    async def pause(self, in_flight: str) -> None:
        """Lets requests go on."""

    async def receive(self, manifest: Manifest) -> str:
        """Says that the weights came."""
        return CHECKSUM

    async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Log-probs of zero."""
        return [np.zeros(len(sequence) - 1, np.float32) for sequence in sequences]

    async def stale(self) -> list[str]:
        """Names no weight."""
        return []

    async def commit(self, version: int) -> None:
        """Stamps later samples with the version."""
        self.version, self.checksum = version, CHECKSUM
        self.checksums = {version: CHECKSUM}

    async def abort(self) -> bool:
        """Keeps the version."""
        return True

    def shutdown(self) -> None:
        """Ends nothing."""


class EmulatedScorer:
    """Scores that follow from the response's first token."""

    max_length = LONGEST
    vocab_size: int | None = VOCABULARY
    texts = False
    names: tuple[str, ...] = ()
    passes = 1
    batch_s: float | None = None
    patience_s: float | None = None

    def __init__(self, sleep: Sleep) -> None:
        self.batch_tokens = sleep.tokens
        self.identity = reward_pb2.ScorerIdentity(name="function:emulated", model_hash="none")
        self._sleep = sleep

    def score(self, pairs: Sequence[EncodedPair]) -> Sequence[Result]:
        """One score per pair."""
        time.sleep(self._sleep.seconds("score", len(pairs)))
        return list(np.asarray([[pair.response_ids[0] % 7] for pair in pairs], np.float32))

    def check(self) -> None:
        """Finds nothing wrong."""


class EmulatedModel:
    """Log-probs that are all the same."""

    vocab_size, max_length = VOCABULARY, LONGEST

    def __init__(self, sleep: Sleep) -> None:
        self._sleep = sleep

    def logprobs(self, trajectories: Columns, distribution: Distribution) -> Floats:
        """Log-probs of the sampled tokens, [M]."""
        time.sleep(self._sleep.seconds("reference", len(trajectories)))
        return np.full(trajectories.size("sampled"), -1.5, np.float32)

    def check(self) -> None:
        """Finds nothing wrong."""


class EmulatedRank:
    """A rank whose critic learns nothing. One call at a time, as a rank's process takes them."""

    death = ""
    stopped = False

    def __init__(self, sleep: Sleep) -> None:
        self._sleep, self._turn = sleep, asyncio.Lock()
        self._answers: dict[str, Callable[..., tuple[float, Any]]] = {
            CriticTrainer.limits.__qualname__: lambda: (0.0, (VOCABULARY, LONGEST)),
            CriticTrainer.values.__qualname__: self._values,
            CriticTrainer.train.__qualname__: lambda *parts, **_: (sleep.seconds("train_critic"), {"loss": 0.0}),
        }

    def _values(self, trajectories: Columns) -> tuple[float, Floats]:
        values = np.linspace(0, 1, trajectories.size("sampled"), dtype=np.float32)
        return self._sleep.seconds("values", len(trajectories)), values

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Answers after the time that the call takes; the start of a rank takes none."""
        if method != "run":
            return None
        called, *rest = arguments
        async with self._turn:
            seconds, answer = self._answers[called](*rest, **options)
            await asyncio.sleep(seconds)
        return answer

    def kill(self) -> bool:
        """Ends nothing."""
        return True


async def start_engine(sleep: Sleep, config: RolloutConfig) -> Engine:
    """The engine of a rollout replica."""
    from quartet.models.loading import load_tokenizer

    return EmulatedEngine(sleep, load_tokenizer(config.model))


def make_scorer(sleep: Sleep, *_: Any) -> Scorer:
    """The scorer of a reward replica."""
    return EmulatedScorer(sleep)


def load_model(sleep: Sleep, *_: Any) -> Frozen:
    """The model of a reference replica."""
    return EmulatedModel(sleep)


def start_ranks(sleep: Sleep, _: CriticConfig) -> RankGroup:
    """The ranks of a critic replica."""
    return RankGroup("critic", [EmulatedRank(sleep)])


def build(args: dict[str, Any]) -> serve.Application:
    """Builds the application of the service that `args` names."""
    sleep, folder = Sleep(Path(args["pace"]), int(args["batch"])), args["folder"]
    if args["service"] == "rollout":
        rollout = RolloutConfig(
            model=folder, dtype="float32", max_length=LONGEST, max_num_seqs=sleep.batch, weight_backend="gloo"
        )
        return _bound(Rollout, rollout, partial(start_engine, sleep))
    if args["service"] == "reward":
        scorer = FunctionScorerConfig(kind="function", function="emulated:score")
        return _bound(Reward, Hosted(scorer, folder), partial(make_scorer, sleep))
    if args["service"] == "reference":
        reference = ReferenceConfig(model=folder, dtype="float32", batch_tokens=sleep.tokens)
        return _bound(Reference, reference, partial(load_model, sleep))
    learner = {"optimizer": {"learning_rate": 1e-3}, "micro_batch_tokens": sleep.tokens}
    critic = CriticConfig.parse({"model": folder, "root": folder} | learner, "critic")
    return _bound(Critic, critic, partial(start_ranks, sleep))


def _bound(deployment: Any, config: Any, made: Callable[..., Any]) -> serve.Application:
    light = deployment.options(ray_actor_options={"num_cpus": 0.1}, graceful_shutdown_timeout_s=1)
    application: serve.Application = light.bind(config, made)
    return application
