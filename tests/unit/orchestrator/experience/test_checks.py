"""Answers that are not numbers, or too many of them: named, before anything is trained on or kept."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.commands.restarts import is_loss
from orchestrator.data.prompts import PromptStream
from orchestrator.experience.beside import Beside
from orchestrator.experience.collector import Collector
from orchestrator.experience.experience import Collected
from orchestrator.experience.journal import ExperienceJournal
from orchestrator.experience.requests import Used
from orchestrator.experience.stream import Stream
from protos import critic_pb2
from protos.critic_pb2_grpc import CriticServicer, add_CriticServicer_to_server
from quartet.wire.codec import pack_metrics
from quartet.wire.errors import InvalidReply, leaves
from services.critic.client import CriticClient
from tests.trajectories import of
from tests.unit.fakes import Fakes, make_config, make_prompts, make_requests, respond
from tests.unit.wire import served

NAN, INF = float("nan"), float("inf")


def spoiled(length: int, value: float) -> Any:
    row = np.full(length, -0.5, np.float32)
    row[-1] = value
    return row


# The responses are [10], [11, 11] and [12, 12, 12], to prompts of rows 0, 1 and 2.
ANSWERS = {
    "reference": (
        "reference",
        lambda r: spoiled(len(r), NAN if len(r) == 2 else 0.0),
        r"reference.Logprobs: prompt row 1: ref_logprobs\[1\] is nan",
    ),
    "values": (
        "critic",
        lambda r: spoiled(len(r), INF if len(r) == 3 else 0.0),
        r"critic.Values: prompt row 2: values\[2\] is inf",
    ),
}


async def first_batch(opened: Callable[..., Stream]) -> Collected:
    """The experience that a run with a fresh critic trains on first."""
    async with Beside() as beside:
        stream = opened(beside, step=0, version=1, used=Used())
        collected = await stream.take(1, critic_step=0)
        return await stream.complete(1, collected, critic_step=0)


@pytest.mark.parametrize(("service", "answer", "said"), ANSWERS.values(), ids=list(ANSWERS))
async def test_an_answer_that_cannot_be_is_named_and_not_kept(
    tmp_path: Path, policy_folder: Path, service: str, answer: Any, said: str
) -> None:
    fakes = Fakes()
    good = getattr(fakes, service).answer
    getattr(fakes, service).answer = answer
    config = make_config(policy_folder, batch_size=3)
    journal = ExperienceJournal(tmp_path, config)
    prompts = PromptStream(make_prompts(3), 0)
    opened = partial(Stream, config, prompts, Collector(fakes.services, config), journal)
    with pytest.raises(ExceptionGroup) as caught:
        await first_batch(opened)
    wrong = [leaf for leaf in leaves(caught.value) if isinstance(leaf, InvalidReply)]
    with pytest.raises(InvalidReply, match=said):
        raise wrong[0]
    # Going back to a checkpoint would not help: the run ends with the name of what is wrong.
    assert not is_loss(caught.value)
    assert journal.read(1, prompts.dealt) is None
    # Once the service is well again, the run goes on from there.
    getattr(fakes, service).answer = good
    assert len(await first_batch(opened)) == 3


NOTHING = {"response_ids": np.empty(0, np.int32), "logprobs": np.empty(0, np.float32), "spans": ()}


@pytest.mark.parametrize(
    ("spoiling", "said"),
    [
        ({"logprobs": spoiled(2, NAN)}, r"logprobs\[1\] is nan"),
        (NOTHING, "response_ids: empty; every response has a"),
    ],
)
async def test_a_sample_that_cannot_be_is_not_scored(
    policy_folder: Path, spoiling: dict[str, Any], said: str
) -> None:
    fakes = Fakes()

    def wrong(index: int, prompt: Any, version: int) -> Any:
        sample = respond(index, prompt, version)
        return replace(sample, **spoiling) if len(sample.response_ids) == 2 else sample

    fakes.rollout.respond = wrong
    with pytest.raises(ExceptionGroup) as caught:
        await Collector(fakes.services, make_config(policy_folder)).collect(
            make_requests(3), version=1, critic_step=0
        )
    with pytest.raises(InvalidReply, match=f"rollout.Generate: prompt row 1: {said}"):
        raise next(leaf for leaf in leaves(caught.value) if isinstance(leaf, InvalidReply))
    assert not [row for row in fakes.reward.responses() if len(row) in (0, 2)]


async def test_a_critics_metrics_are_looked_at() -> None:
    class Critic(CriticServicer):  # type: ignore[misc]
        async def Train(self, request: Any, context: Any) -> Any:
            return critic_pb2.TrainResponse(metrics=pack_metrics({"loss": NAN, "mean": 0.5}))

    ids, row = [np.asarray([5], np.int32)], [np.zeros(1, np.float32)]
    async with served(add_CriticServicer_to_server, Critic()) as channel:
        with pytest.raises(InvalidReply, match=r"^critic.Train: metrics: loss is nan; must be finite$"):
            await CriticClient(channel).train(
                1, of(ids, ids, values=row, returns=row), epochs=1, minibatch_size=1, seed=0, timeout_s=5
            )
