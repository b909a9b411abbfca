"""Proof that rollout replicas compute with the weights that were pushed to them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol

from orchestrator.config.run import OrchestratorConfig
from orchestrator.push.source import both
from orchestrator.push.tolerance import Tolerance
from protos import common_pb2
from protos import rollout_pb2 as pb
from quartet.weight_transfer.probe import Probe, probe_sequences, scores_of
from quartet.wire.codec import Floats, Ints, pack_sequences
from quartet.wire.errors import ServiceError

log = logging.getLogger("quartet")

Ask = Callable[[pb.Probe], Awaitable[Sequence[pb.WeightReport]]]

BOUNDS = {"float32": (1e-4, 1e-3), "bfloat16": (0.05, 0.25)}
"""Least and most of the default tolerance, as a part of the log-probs' spread. In bfloat16 models of 2 to 24 layers,
whose log-probs had spreads of 1 to 32 nats, differ by 0.01 to 0.045 of it (docs/weights.md)."""
PUSHES_WITHOUT_PROOF = 3
"""Pushes in a row without a proof, because a replica died meanwhile or had no time, at which the push fails."""


class PushDisproved(ServiceError):
    """A replica that took a push computes with other weights, or gave no proof in PUSHES_WITHOUT_PROOF pushes. A
    repetition would not help."""


class ProbeLearner(Protocol):
    """The learner's part of a proof."""

    async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Log-probs of all tokens but the first of each sequence, under the weights that are being pushed."""


class Prover:
    """Makes replicas score a few fixed sequences after a push, and compares with the learner."""

    def __init__(self, learner: ProbeLearner, sequences: Sequence[Ints], tolerance: Tolerance, every: int) -> None:
        """
        Args:
            learner: scores the sequences too.
            sequences: the sequences, from `probe_sequences`.
            tolerance: largest mean absolute difference, as a part of the log-probs' spread; learns from the first
                proof.
            every: pushes between two proofs of the same members; 0: only the first two pushes, and those after a
                change of members, are proved.
        """
        self._learner = learner
        self._sequences = list(sequences)
        self._tolerance = tolerance
        self._every = every
        self._proved: set[str] = set()
        """The members that have given the last proof."""
        self._unproved = 0
        """Pushes since the last proof."""
        self._proofs = 0
        """Proofs given. The first push usually brings the weights that replicas began with, so that even one that
        ignores them agrees: the second is proved as well, whose weights training has moved."""
        self._owed = 0
        self._learner_logprobs: asyncio.Future[list[Floats]] | None = None
        self._scored = 0
        """Number of the push that the learner scored for."""

    def begin(self, push: int, members: Collection[str]) -> None:
        """Makes the learner score, in the background, if a proof of these members is due; once for all attempts of
        push number `push`."""
        if self._is_due(members) and self._scored != push:
            self._learner_logprobs, self._scored = asyncio.ensure_future(self._learner.score(self._sequences)), push

    async def scored(self) -> None:
        """Returns when the learner has scored, if a proof is due; from then on training may change its weights."""
        if self._learner_logprobs is not None:
            await asyncio.wait([self._learner_logprobs])

    async def prove(self, push: int, version: int, members: Collection[str], ask: Ask) -> float | None:
        """Compares at the end of a push; returns the largest mean difference of a member, as a part of the spread, or
        None without a proof, which is one of all members. If the learner has not scored for these members, because
        some came after the weights were staged, the next push proves them.

        Args:
            push: number of the push.
            version: version that was pushed.
            members: replicas that took it.
            ask: makes every member score; returns the reports of those that answered.

        Raises:
            PushDisproved: a member computes with other weights; the message says by how much its log-probs differ.
                Or the last PUSHES_WITHOUT_PROOF pushes had no proof.
        """
        if self._learner_logprobs is None or self._scored != push:
            self._unproved += 1
            return None
        scoring, self._learner_logprobs = self._learner_logprobs, None
        self._proved = set()  # so that the next push is proved if this one is not, whoever its members are
        # At the same time, since each side's pass reads all weights of the model, as a push does.
        answers, logprobs = await both(ask(self._asked), scoring)
        probe = Probe(self._sequences, logprobs, self._tolerance.now)
        reports = {report.replica: report for report in answers}
        if wrong := [f"{name} {said}" for name in members if (said := _wrong(reports.get(name), probe))]:
            raise PushDisproved(f"version {version}: {'; '.join(wrong)}")
        measured = [probe.measure(scores_of(report, self._sequences)) for report in answers if report.ok]
        if measured:
            self._tolerance.learn(max(measured))
        complete = self._settle(version, {name: _why(reports.get(name)) for name in members})
        return max(measured) if complete else None

    async def of_members(self, ask: Ask) -> Probe | None:
        """The answer expected of a newcomer between two pushes: a member's, since the learner may have trained
        meanwhile. None if no member answers; the next push then proves the newcomer."""
        for report in await ask(self._asked):
            if report.ok:
                return Probe(self._sequences, scores_of(report, self._sequences), self._tolerance.now)
        return None

    def _is_due(self, members: Collection[str]) -> bool:
        changed = set(members) != self._proved
        return changed or self._proofs == 1 or 0 < self._every <= self._unproved + 1

    @property
    def _asked(self) -> pb.Probe:
        return pb.Probe(sequences=pack_sequences(self._sequences))

    def _settle(self, version: int, reasons: dict[str, str]) -> bool:
        """Records the members without a proof; an empty reason means that a member gave it. True if all did."""
        missing = {name: reason for name, reason in reasons.items() if reason}
        if not missing:
            self._proved, self._unproved, self._owed = set(reasons), 0, 0
            self._proofs += 1
            return True
        self._owed += 1
        if self._owed >= PUSHES_WITHOUT_PROOF:
            told = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
            raise PushDisproved(
                f"version {version}: no proof in {self._owed} pushes in a row: {told}; see whether these replicas "
                "are busy or dead, or raise weights.timeout_s"
            )
        log.warning("version %d: no proof yet of %s", version, missing)
        return False


def _wrong(report: pb.WeightReport | None, probe: Probe) -> str:
    """The disagreement of an answer; empty if it agrees or is missing."""
    if report is None or not report.ok:
        return ""
    return probe.disagreement(scores_of(report, probe.sequences), list(report.stale))


def make_prover(
    config: OrchestratorConfig, learner: ProbeLearner, model: common_pb2.ModelInfo, vocabulary: int | None
) -> Prover:
    """The prover for a configuration.

    Args:
        config: the run's configuration.
        learner: the policy's learner.
        model: the model that the replicas serve.
        vocabulary: upper limit of ids; None for the model's vocabulary.
    """
    weights = config.weights
    sequences = probe_sequences(vocabulary or model.vocab_size, model.max_length)
    tolerance = Tolerance.of(weights.prove_tolerance, BOUNDS[config.policy.dtype])
    return Prover(learner, sequences, tolerance, weights.prove_every)


def _why(report: pb.WeightReport | None) -> str:
    """Reason of a missing proof; empty if the proof was given."""
    if report is None:
        return "did not answer"
    return "" if report.ok else report.error
