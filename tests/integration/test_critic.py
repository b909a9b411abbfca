"""The critic service over gRPC. Other tests train it too, so each begins from the last step trained."""

from typing import Any

import grpc
import numpy as np
import pytest

from protos import critic_pb2
from quartet.wire.codec import Floats, Ints
from quartet.wire.errors import FailedPrecondition
from tests import plain
from tests.cluster import Quartet, refused
from tests.integration.malformed import MALFORMED, pairs
from tests.models import MAX_LENGTH, ROWS
from tests.pushing import hold_critic
from tests.trajectories import cut
from tests.trajectories import of as trajectories

PAIRS = plain.random_pairs(12, seed=3)


async def values(quartet: Quartet, of: tuple[list[Ints], list[Ints]] = PAIRS) -> list[Floats]:
    return cut((await quartet.critic.values(trajectories(*of), timeout_s=60)).values, of[1])


async def train(quartet: Quartet, step: int, old: list[Floats] | None = None) -> dict[str, float]:
    """One epoch towards returns of 1 everywhere, from values that are the critic's now or were before."""
    await hold_critic(quartet.critic)
    old = old or await values(quartet)
    returns = [np.ones_like(row) for row in old]
    batch = trajectories(*PAIRS, values=old, returns=returns)
    return await quartet.critic.train(step, batch, epochs=1, minibatch_size=6, seed=0, timeout_s=60)


async def last_step(quartet: Quartet) -> int:
    return (await quartet.critic.info(30)).last_step


async def test_info_describes_the_model(quartet: Quartet) -> None:
    info = await quartet.critic.info(30)
    assert info.initialised_from == str(quartet.reward)
    assert (info.model.vocab_size, info.model.max_length) == (ROWS, MAX_LENGTH)


async def test_values_are_those_of_the_saved_model(quartet: Quartet) -> None:
    actual = await values(quartet)
    await hold_critic(quartet.critic)
    await quartet.critic.save("saved/critic", 60)
    saved = quartet.folder / "runs" / "saved" / "critic"
    assert plain.furthest(actual, plain.values(str(saved), *PAIRS)) < 1e-4
    # Again, over the first.
    await quartet.critic.save("saved/critic", 60)


async def test_training_moves_values_towards_the_returns(quartet: Quartet) -> None:
    before = np.concatenate(await values(quartet))
    metrics = await train(quartet, await last_step(quartet) + 1)
    after = np.concatenate(await values(quartet))
    assert np.square(after - 1).mean() < np.square(before - 1).mean()
    assert {"loss", "clip_fraction", "mean", "grad_norm", "learning_rate"} <= metrics.keys()
    assert np.isfinite(list(metrics.values())).all()


async def test_a_step_asked_for_twice_is_trained_once(quartet: Quartet) -> None:
    step = await last_step(quartet) + 1
    old = await values(quartet)
    first = await train(quartet, step, old)
    after = await values(quartet)
    assert await train(quartet, step, old) == first
    assert plain.furthest(await values(quartet), after) == 0.0
    assert await last_step(quartet) == step
    # Another batch under the same step is not answered with the first one's result.
    with pytest.raises(FailedPrecondition, match=f"step: {step} was trained on another batch"):
        await train(quartet, step)
    assert plain.furthest(await values(quartet), after) == 0.0


async def test_a_batch_that_travels_in_parts_is_trained_on_once_and_as_a_whole(quartet: Quartet) -> None:
    step = await last_step(quartet) + 1
    await hold_critic(quartet.critic)
    prompts, responses = (side * 50 for side in PAIRS)
    old = await values(quartet, (prompts, responses))
    returns = [np.ones_like(row) for row in old]
    call: dict[str, Any] = {"epochs": 1, "minibatch_size": 600, "seed": 0, "timeout_s": 60}
    # Some tokens are left out, of which the returns would be far off.
    draw = np.random.default_rng(4)
    marks = [draw.random(len(row)) < 0.5 for row in old]
    returns = [np.where(mark, row, np.float32(1000)) for mark, row in zip(marks, returns, strict=True)]
    batch = trajectories(prompts, responses, values=old, returns=returns, trained=marks)
    metrics = await quartet.critic.train(step, batch, **call)
    assert metrics["mean"] == pytest.approx(np.concatenate(old)[np.concatenate(marks)].mean(), abs=1e-4)
    assert metrics["loss"] < 100
    after = await values(quartet)
    assert await quartet.critic.train(step, batch, **call) == metrics
    assert plain.furthest(await values(quartet), after) == 0.0
    assert await last_step(quartet) == step


@pytest.mark.parametrize(
    ("method", "kind"),
    [("Values", kind) for kind in MALFORMED] + [("Train", "cut off")],
)
async def test_malformed_trajectories_are_refused_by_name(quartet: Quartet, method: str, kind: str) -> None:
    wrong, message = MALFORMED[kind]
    field = {"Values": "trajectories", "Train": "batch"}[method]
    request = getattr(critic_pb2, f"{method}Request")(**{field: wrong})
    code, details = await refused(ask(quartet, method, request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert field + message in details
    assert len(await values(quartet)) == len(PAIRS[0])


async def ask(quartet: Quartet, method: str, request: Any) -> Any:
    reply = getattr(critic_pb2, f"{method}Response")
    return await quartet.call(f"/quartet.v1.Critic/{method}", request, reply, "critic")


_TWO = [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": [[0, np.nan]]}, "batch.values[1] is nan; must be finite"),
        ({"epochs": 0}, "epochs: 0; must be at least 1"),
        ({"minibatch_size": -3}, "minibatch_size: -3; must be at least 1"),
    ],
)
async def test_a_malformed_batch_is_refused_by_name_and_trains_nothing(
    quartet: Quartet, change: Any, message: str
) -> None:
    step = await last_step(quartet)
    fields = {"step": step + 1, "values": _TWO, "returns": _TWO, "epochs": 1, "minibatch_size": 1} | change
    call = {name: fields.pop(name) for name in ("step", "epochs", "minibatch_size")}
    request = critic_pb2.TrainRequest(batch=pairs([[5]], [[6, 7]], **fields), **call)
    code, details = await refused(ask(quartet, "Train", request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message in details
    assert await last_step(quartet) == step
