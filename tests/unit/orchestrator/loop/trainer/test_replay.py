"""A run of the loop with real learners, straight and from its journal: the same weights, and the same as ever."""

import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.algorithms.kl import adapted
from orchestrator.algorithms.rewards import RunningNormaliser
from orchestrator.clients import Services
from orchestrator.data.prompts import PromptStream
from orchestrator.experience.collector import Collector
from orchestrator.experience.journal import ExperienceJournal
from orchestrator.experience.requests import training_requests
from orchestrator.experience.stream import Stream
from orchestrator.learners import CriticLearner, Update
from orchestrator.loop.batch import Batch
from orchestrator.loop.estimate import estimate_advantages, measure_distance
from orchestrator.loop.state import TrainState
from orchestrator.loop.trainer import Trainer
from orchestrator.monitoring.record import Record
from orchestrator.policy.ranks import Policy
from orchestrator.policy.trainer import PolicyTrainer
from orchestrator.push.pusher import PushReport
from orchestrator.tracing.spans import UNTRACED
from orchestrator.tracing.waits import Waits
from quartet.columns import Columns
from quartet.models.distribution import Distribution
from quartet.ranks.group import RankGroup
from quartet.ranks.thread_rank import ThreadRank
from services.critic.client import Values
from services.critic.config import CriticConfig
from services.critic.trainer import CriticTrainer
from services.rollout.sample import FinishReason, Sample
from tests.unit.fake_ranks import part
from tests.unit.fake_run import FakeCheckpoints, FakeLog, FakeProgress, FakePusher
from tests.unit.fakes import Fakes, Journal, make_config, make_prompts

STEPS = 3
OPTIMIZER = {"learning_rate": 1e-3}
KL = {"coef": 0.2, "target": 3, "horizon": 40}


class SeededRollout:
    """Draws each response from its seed, and from nothing else."""

    def __init__(self) -> None:
        self.drawn = 0

    async def generate(self, prompts: Sequence[Any], sampling: Any, **options: Any) -> AsyncIterator[list[Sample]]:
        for index, seed in enumerate(options["seeds"]):
            self.drawn += 1
            draw = np.random.default_rng(seed)
            count = int(draw.integers(1, 6))
            ids, logprobs = draw.integers(3, 20, count).astype(np.int32), draw.uniform(-4, -2, count)
            reason = FinishReason.LENGTH if seed % 2 else FinishReason.STOP
            spans = ((options["min_version"], 0, count),)
            yield [Sample(index, ids, logprobs.astype(np.float32), reason, spans)]


class LocalCritic:
    """The critic service's part, for a value model in this process."""

    def __init__(self, folder: Path) -> None:
        settings = {"model": str(folder), "optimizer": OPTIMIZER}
        self.trainer = CriticTrainer(CriticConfig.parse(settings, "critic"))

    async def values(self, columns: Columns, *, min_step: int, timeout_s: float) -> Values:
        return Values(self.trainer.values(columns), [min_step] * len(columns))

    async def train(self, step: int, batch: Columns, **options: Any) -> dict[str, float]:
        schedule = {name: options[name] for name in ("epochs", "minibatch_size", "seed")}
        return self.trainer.train(batch, **schedule)


class WatchedPusher(FakePusher):
    """Keeps the digests of what is pushed."""

    def __init__(self, journal: Journal, learner: PolicyTrainer) -> None:
        super().__init__(journal)
        self.learner = learner
        self.pushed: list[str] = []

    async def push(self, version: int) -> PushReport:
        self.pushed.append(digest(self.learner.learner.full_weights()))
        return await super().push(version)


def digest(weights: Iterator[tuple[str, Any]]) -> str:
    actual = hashlib.sha256()
    for name, tensor in weights:
        actual.update(name.encode() + tensor.detach().cpu().numpy().tobytes())
    return actual.hexdigest()


class Run:
    """One run over a journal in `folder`; at its end the digests of the learners' weights, and what was logged."""

    def __init__(self, policy_folder: Path, folder: Path, **section: Any) -> None:
        algorithm = {"minibatch_size": 2, "epochs": 2, "normalise_scores": True, "kl": KL}
        settings: dict[str, Any] = {
            "steps": STEPS,
            "batch_size": 4,
            "prompts_per_call": 3,
            "seed": 7,
            "algorithm": algorithm,
        }
        settings["policy"] = {"model": str(policy_folder), "optimizer": OPTIMIZER}
        self.config = make_config(policy_folder, **settings | {"loop": {"mismatch_limit": 100.0}} | section)
        self.policy_folder, self.folder = policy_folder, folder
        self.rollout, self.fakes = SeededRollout(), Fakes()
        self.log, self.progress = FakeLog(self.fakes.journal), FakeProgress()
        self.weights: tuple[str, str] = ("", "")
        self.pushed: list[str] = []
        """Digests of the policy's weights, before the first step and after each."""

    @asynccontextmanager
    async def policy(self) -> AsyncIterator[tuple[Policy, PolicyTrainer]]:
        rank = ThreadRank(60)
        ranks = RankGroup("policy", [rank])
        arguments = self.config.scheduled_policy, self.config.algorithm, Distribution(1.0)
        await ranks.start(PolicyTrainer, *arguments, timeout_s=60)
        yield Policy(ranks, self.config), part(rank, PolicyTrainer)
        ranks.stop()

    async def finish(self) -> "Run":
        critic, config = LocalCritic(self.policy_folder), self.config
        services = Services(self.rollout, self.fakes.reward, self.fakes.reference, critic)  # type: ignore[arg-type]
        opened = partial(
            Stream,
            config,
            PromptStream(make_prompts(5), config.seed),
            Collector(services, config),
            ExperienceJournal(self.folder, config),
        )
        async with self.policy() as (policy, learner):
            pusher = WatchedPusher(self.fakes.journal, learner)
            trainer = Trainer(
                config,
                opened,
                policy,
                [policy, CriticLearner(critic, config, first_step=0)],  # type: ignore[arg-type]
                pusher,
                FakeCheckpoints(self.fakes.journal),  # type: ignore[arg-type]
                None,
                Record(self.log, self.progress, config.steps),  # type: ignore[arg-type]
                Waits(UNTRACED),
            )
            await trainer.run(TrainState(step=0, first_version=1, first_critic_step=0), self.folder / "policy")
            self.weights = digest(learner.learner.full_weights()), digest(critic.trainer.learner.full_weights())
        self.pushed = pusher.pushed
        return self

    async def written_out(self) -> "Run":
        """The same run as a plain algorithm, one thing after the other, without streams, slots, journal or tasks."""
        config, prompts = self.config, PromptStream(make_prompts(5), self.config.seed)
        critic = LocalCritic(self.policy_folder)
        services = Services(self.rollout, self.fakes.reward, self.fakes.reference, critic)  # type: ignore[arg-type]
        collector = Collector(services, config)
        values_of = CriticLearner(critic, config, first_step=0)  # type: ignore[arg-type]
        kl_coef, normalisers = KL["coef"], dict[str, RunningNormaliser]()
        async with self.policy() as (policy, learner):
            for step in range(config.steps):
                numbers = range(step * config.batch_size, (step + 1) * config.batch_size)
                requests = training_requests(config, prompts, numbers)
                collected = await collector.collect(requests, version=step + 1, critic_step=step)
                batch = Batch.of(collected)
                batch = Batch.of(collected.with_sampled(old_logprobs=await policy.logprobs(batch.columns)))
                estimate = estimate_advantages(
                    batch, batch.old_logprobs, config.algorithm, kl_coef, normalisers, step=step + 1
                )
                assert estimate.returns is not None
                columns = batch.columns.with_sampled(advantages=estimate.advantages, returns=estimate.returns)
                update = Update(step + 1, config.seed * 1_000_003 + step + 1, columns, kl_coef)
                await policy.train(update)
                await values_of.train(update)
                distance = measure_distance(batch, batch.columns.rows("old_logprobs"), config.algorithm, step + 1)
                assert distance.kl is not None
                kl_coef = adapted(kl_coef, distance.kl, len(batch), target=KL["target"], horizon=KL["horizon"])
                normalisers = estimate.normalisers
            self.weights = digest(learner.learner.full_weights()), digest(critic.trainer.learner.full_weights())
        return self


GOLDEN = {
    "score/mean": [9.5, 8.75, 13.0],
    "kl/reference": [-12.12887, -14.68309, -11.97012],
    "policy/loss": [-0.006108054, 0.01430013, 0.01579595],
    "value/loss": [3.280035, 3.538765, 1.4086],
    "policy/grad_norm": [0.4799204, 0.2152133, 0.8169304],
}
"""Measured at lock-step; a change of the loop that moves them changes the algorithm."""


@pytest.mark.processes  # for its length: eight steps of real learners, twice
async def test_lock_step_is_the_algorithm_bit_for_bit(policy_folder: Path, tmp_path: Path) -> None:
    run = await Run(policy_folder, tmp_path, steps=8).finish()
    assert run.config.loop.max_staleness == 0
    assert run.weights == (await Run(policy_folder, tmp_path / "plain", steps=8).written_out()).weights
    # They are weights that depend on what they were trained on.
    assert len({*run.pushed}) == len(run.pushed) == 9


async def test_a_run_from_its_journal_ends_with_the_same_weights(policy_folder: Path, tmp_path: Path) -> None:
    straight, again = [await Run(policy_folder, tmp_path).finish() for _ in range(2)]
    assert (straight.rollout.drawn, again.rollout.drawn) == (STEPS * 4, 0)
    assert again.weights == straight.weights
    for name, wanted in GOLDEN.items():
        actual = [[run.log.lines[step][name] for step in range(1, STEPS + 1)] for run in (straight, again)]
        assert actual[0] == actual[1]
        assert actual[0] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("old_logprobs", ["learner", "rollout"])
async def test_the_policy_rests_while_the_critic_learns_alone(
    policy_folder: Path, tmp_path: Path, old_logprobs: str
) -> None:
    """The weights, the optimizer and the coefficient of the penalty stay as they were; the critic learns in each
    step."""
    algorithm = {"minibatch_size": 2, "epochs": 2, "kl": KL, "critic_only_steps": 3, "old_logprobs": old_logprobs}
    rate = {"learning_rate": 1e-3, "schedule": "cosine"}
    policy = {"model": str(policy_folder), "optimizer": rate}
    runs = [Run(policy_folder, tmp_path, steps=5, algorithm=algorithm, policy=policy) for _ in range(2)]
    straight, again = [await run.finish() for run in runs]
    assert again.rollout.drawn == 0
    assert again.weights == straight.weights
    before = straight.pushed[0]
    assert straight.pushed[:4] == [before] * 4
    assert len({*straight.pushed}) == 3
    lines = straight.log.lines
    for step in (1, 2, 3):
        assert not [name for name in lines[step] if name in ("policy/loss", "policy/learning_rate")]
        assert lines[step]["value/grad_norm"] > 0
        assert lines[step]["kl/coef"] == KL["coef"]
        assert "mismatch/mean_abs" in lines[step]
    assert lines[4]["kl/coef"] == KL["coef"] != lines[5]["kl/coef"]
    # The schedule has four optimizer steps for each of the two steps that are left.
    assert straight.config.optimizer_steps == 8
    assert lines[4]["policy/learning_rate"] > lines[5]["policy/learning_rate"]


class Overtaken(SeededRollout):
    """All tokens of a response but the first come from the version after."""

    async def generate(self, *asked: Any, **options: Any) -> AsyncIterator[list[Sample]]:
        version = options["min_version"]
        async for (sample,) in super().generate(*asked, **options):
            count = len(sample.response_ids)
            later = ((version + 1, 1, count),) if version > 1 and count > 1 else ((version, 1, count),)
            yield [replace(sample, spans=((version, 0, 1), *later))]


async def test_a_run_that_leaves_out_old_tokens_ends_with_the_same_weights_from_its_journal(
    policy_folder: Path, tmp_path: Path
) -> None:
    """All tokens are two versions behind at step 3; later on the first ones of each response."""
    section = {"steps": 6, "loop": {"max_staleness": 2, "mismatch_limit": 100.0}}
    algorithm = {"minibatch_size": 2, "epochs": 2, "kl": KL, "max_token_staleness": 1}
    runs = []
    for _ in range(2):
        run = Run(policy_folder, tmp_path, **section, algorithm=algorithm)
        run.rollout, run.progress = Overtaken(), FakeProgress(silent=False)
        runs.append(await run.finish())
    straight, again = runs
    assert again.rollout.drawn == 0
    assert again.weights == straight.weights
    shares = [[run.log.lines[step]["staleness/masked"] for step in range(1, 7)] for run in runs]
    assert shares[0] == shares[1]
    assert shares[0][:3] == [0, 0, 1]
    assert all(0 < share < 1 for share in shares[0][3:])
    for run in runs:
        assert [name for name, *_ in run.progress.calls if name == "note"] == ["note"]
        assert run.log.lines[3]["policy/empty_steps"] == run.log.lines[3]["value/empty_steps"] == 4
        assert "policy/loss" in run.log.lines[4]
