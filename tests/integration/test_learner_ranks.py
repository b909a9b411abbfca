"""Two ranks as Ray actors: the policy with ZeRO 3, both sending to the rollout replicas; the critic with ZeRO 2."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import ray

from orchestrator.config.run import OrchestratorConfig
from orchestrator.learners import Update
from orchestrator.policy.ranks import Policy
from orchestrator.policy.sampled import sampled_from
from protos import rollout_pb2 as pb
from quartet.models.loading import load_tokenizer
from quartet.ranks.group import RanksLost
from quartet.wire.errors import ServiceError
from services.critic.client import CriticClient
from tests import plain
from tests.cluster import Quartet, eventually
from tests.computing import computing
from tests.learner_batches import PolicyBatch
from tests.pushing import TIMEOUT_S, hold_critic, push
from tests.trajectories import cut, of

PROMPTS, RESPONSES = plain.random_pairs(31, seed=22, longest=20)
PAIRS = of(PROMPTS, RESPONSES)


@pytest.fixture(scope="module")
async def learner(quartet: Quartet, on_ray: None) -> AsyncIterator[Policy]:
    """Two ranks; every parameter but the norms in pieces."""
    raw = quartet.raw["orchestrator"]
    layout = {
        "ranks": 2,
        "zero_stage": 3,
        "zero_persist_below": 100,
        "optimizer": {"learning_rate": 0.001},
    }
    raw = raw | {
        "policy": raw["policy"] | layout,
        "weights": raw.get("weights", {}) | {"senders": 2, "bucket_mib": 1},
    }
    config = OrchestratorConfig.parse(raw, "orchestrator")
    policy = await Policy.start(config, sampled_from(config, load_tokenizer(config.policy.model)))
    yield policy
    await policy.close()


def make_batch(logprobs: list[np.ndarray]) -> PolicyBatch:
    advantages = [np.linspace(-1, 1, len(row), dtype=np.float32) for row in logprobs]
    return PolicyBatch(PROMPTS, RESPONSES, logprobs, logprobs, logprobs, advantages, 0.0)


async def test_two_ranks_compute_train_and_push_as_one(quartet: Quartet, learner: Policy) -> None:
    expected = cut(await quartet.reference.logprobs(PAIRS, temperature=1.0, timeout_s=60), RESPONSES)
    before = cut(await learner.logprobs(PAIRS), RESPONSES)
    assert plain.furthest(before, expected) < 1e-4
    metrics = await learner.train(Update(step=1, seed=0, columns=make_batch(before).columns, kl_coef=0.0))
    assert metrics["ratio_mean"] == pytest.approx(1, abs=0.5)
    assert plain.furthest(cut(await learner.logprobs(PAIRS), RESPONSES), before) > 0.01
    reports = await quartet.services.rollout.update_weights(TIMEOUT_S, discover=pb.Discover())
    version = 1 + max(report.policy_version for report in reports)
    report = await push(quartet.services.rollout, learner, version)
    assert len(report.replicas) == len(reports)
    assert {info.weights_checksum for info in (await quartet.replicas()).values()} == {report.checksum}


# After the other test of the learner, whose ranks end here.
async def test_the_death_of_a_rank_in_training_is_named_and_nothing_hangs(learner: Policy) -> None:
    batch = make_batch([np.zeros(len(row), np.float32) for row in RESPONSES])
    logprobs = [*batch.logprobs] * 200
    many = PolicyBatch(
        PROMPTS * 200, RESPONSES * 200, logprobs, logprobs, logprobs, [*batch.advantages] * 200, kl_coef=0.0
    )
    actor: Any = learner._ranks._ranks[1]._making.result()  # type: ignore[attr-defined]
    pid = await actor.__ray_call__.remote(lambda _: os.getpid())
    training = asyncio.ensure_future(learner.train(Update(step=1, seed=0, columns=many.columns, kl_coef=0.0)))
    await computing(pid, 120)
    assert not training.done()
    began = time.monotonic()
    ray.kill(actor)
    with pytest.raises(RanksLost, match=r"policy.train: rank 1 of 2 died"):
        await training
    assert time.monotonic() - began < 60
    with pytest.raises(RanksLost, match="rank 1 of 2 died"):
        await learner.logprobs(PAIRS)


@pytest.mark.exhaustive  # two more critics on Serve; the layout itself: tests/unit/quartet/learner
async def test_a_critic_of_two_ranks_serves_and_trains_as_one(quartet: Quartet) -> None:
    one = next(a for a in quartet.raw["applications"] if a["name"] == "critic")
    layout = {"ranks": 2, "zero_stage": 2, "num_cpus": 0.2, "env_vars": {"OMP_NUM_THREADS": "1"}}
    # The first critic has been trained by other tests; a second one of a single rank begins where this one does.
    apps = [
        one
        | {
            "name": name,
            "route_prefix": f"/{name}",
            "args": one["args"] | {"root": str(quartet.folder / name)} | more,
        }
        for name, more in (("single", {}), ("double", layout))
    ]
    quartet.deploy(apps, "critics")
    try:
        single, double = (CriticClient(quartet.channel, app["name"]) for app in apps)
        for critic in (single, double):
            await eventually(partial(answers, critic), 180)
        before = await values(single)
        assert plain.furthest(await values(double), before) < 1e-5
        returns = [np.ones_like(row) for row in before]
        for critic in (single, double):
            await hold_critic(critic)
        options: dict[str, Any] = {"epochs": 1, "minibatch_size": 6, "seed": 0, "timeout_s": 60}
        batch = of(PROMPTS, RESPONSES, values=before, returns=returns)
        wanted, actual = [await critic.train(1, batch, **options) for critic in (single, double)]
        assert actual == pytest.approx(wanted, abs=1e-4)
        after = await values(single)
        assert plain.furthest(await values(double), after) < 1e-3
    finally:
        quartet.deploy([], "critics")


async def values(critic: CriticClient) -> list[Any]:
    return cut((await critic.values(PAIRS, timeout_s=60)).values, RESPONSES)


async def answers(critic: CriticClient) -> bool:
    try:
        return (await critic.info(5)).last_step == 0
    except ServiceError:
        return False
