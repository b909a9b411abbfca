"""The critic service over gRPC. Other tests train it too, so each begins from the last step trained."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from protos import critic_pb2
from services.common.arrays import Floats, Ints, pack_floats
from services.common.errors import FailedPrecondition, InvalidArgument
from tests import plain
from tests.cluster import Quartet, refused
from tests.integration.malformed import MALFORMED, pairs
from tests.models import MAX_LENGTH, WORDS

PAIRS = plain.random_pairs(12, seed=3)


async def values(quartet: Quartet, of: tuple[list[Ints], list[Ints]] = PAIRS) -> list[Floats]:
    return await quartet.services.critic.values(*of, timeout_s=60)


async def train(quartet: Quartet, step: int) -> dict[str, float]:
    """One epoch towards returns of 1 everywhere."""
    old = await values(quartet)
    returns = [np.ones_like(row) for row in old]
    return await quartet.services.critic.train(
        step, *PAIRS, old, returns, epochs=1, minibatch_size=6, seed=0, timeout_s=60
    )


async def last_step(quartet: Quartet) -> int:
    return (await quartet.services.critic.info(30)).last_step


async def test_info_describes_the_model(quartet: Quartet) -> None:
    info = await quartet.services.critic.info(30)
    assert info.initialised_from == str(quartet.reward)
    assert (info.model.vocab_size, info.model.max_length) == (len(WORDS), MAX_LENGTH)


async def test_values_are_those_of_the_saved_model(quartet: Quartet, tmp_path: Path) -> None:
    found = await values(quartet)
    saved = await quartet.services.critic.save(str(tmp_path / "critic"), 60)
    assert saved == str(tmp_path / "critic")
    assert plain.furthest(found, plain.values(saved, *PAIRS)) < 1e-4
    # Again, over the first.
    assert await quartet.services.critic.save(saved, 60) == saved


async def test_two_thousand_pairs_in_one_call(quartet: Quartet) -> None:
    prompts, responses = PAIRS
    found = await values(quartet, (prompts * 170, responses * 170))
    assert plain.furthest(found, await values(quartet) * 170) < 1e-4


async def test_training_moves_values_towards_the_returns(quartet: Quartet) -> None:
    before = np.concatenate(await values(quartet))
    metrics = await train(quartet, await last_step(quartet) + 1)
    after = np.concatenate(await values(quartet))
    assert np.square(after - 1).mean() < np.square(before - 1).mean()
    assert {"loss", "clip_fraction", "mean", "grad_norm", "learning_rate"} <= metrics.keys()
    assert np.isfinite(list(metrics.values())).all()


async def test_a_step_asked_for_twice_is_trained_once(quartet: Quartet) -> None:
    step = await last_step(quartet) + 1
    first = await train(quartet, step)
    after = await values(quartet)
    assert await train(quartet, step) == first
    assert plain.furthest(await values(quartet), after) == 0.0
    assert await last_step(quartet) == step


async def test_a_step_asked_for_twice_at_the_same_time_is_trained_once(quartet: Quartet) -> None:
    step = await last_step(quartet) + 1
    first, second = await asyncio.gather(train(quartet, step), train(quartet, step))
    assert first == second


async def test_an_older_step_is_refused(quartet: Quartet) -> None:
    step = await last_step(quartet) + 2
    await train(quartet, step)
    after = await values(quartet)
    with pytest.raises(FailedPrecondition, match=f"step: {step - 1} is older than the last one trained, {step}"):
        await train(quartet, step - 1)
    assert plain.furthest(await values(quartet), after) == 0.0


@pytest.mark.parametrize("kind", MALFORMED)
@pytest.mark.parametrize("method", ["Values", "Train"])
async def test_malformed_pairs_are_refused_by_name(quartet: Quartet, method: str, kind: str) -> None:
    wrong, message = MALFORMED[kind]
    request = getattr(critic_pb2, f"{method}Request")(pairs=wrong)
    code, details = await refused(ask(quartet, method, request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "pairs" + message in details
    assert len(await values(quartet)) == len(PAIRS[0])


async def ask(quartet: Quartet, method: str, request: Any) -> Any:
    reply = getattr(critic_pb2, f"{method}Response")
    return await quartet.call(f"/quartet.v1.Critic/{method}", request, reply, "critic")


_TWO = pack_floats(np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": b""}, "values: 0 values for 2 response tokens; there must be one per token"),
        ({"returns": _TWO + _TWO}, "returns: 4 values for 2 response tokens"),
        ({"returns": _TWO[:-1]}, "returns: 7 bytes are no whole number of 4-byte float32 values"),
        ({"values": pack_floats(np.asarray([0, np.nan], np.float32))}, "values: value 1 is not finite"),
        ({"returns": pack_floats(np.asarray([np.inf, 0], np.float32))}, "returns: value 0 is not finite"),
        ({"step": 0}, "step: 0; must be at least 1"),
        ({"epochs": 0}, "epochs: 0; must be at least 1"),
        ({"minibatch_size": -3}, "minibatch_size: -3; must be at least 1"),
    ],
)
async def test_a_malformed_batch_is_refused_by_name_and_trains_nothing(
    quartet: Quartet, change: Any, message: str
) -> None:
    step = await last_step(quartet)
    batch = {"step": step + 1, "values": _TWO, "returns": _TWO, "epochs": 1, "minibatch_size": 1} | change
    request = critic_pb2.TrainRequest(pairs=pairs([[5]], [[6, 7]]), **batch)
    code, details = await refused(ask(quartet, "Train", request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message in details
    assert await last_step(quartet) == step


async def test_saving_overwrites_nothing_but_a_model(quartet: Quartet, tmp_path: Path) -> None:
    """A caller's slip must not cost the folder it names."""
    (tmp_path / "diary.txt").write_text("dear diary")
    with pytest.raises(InvalidArgument, match=f"path: {tmp_path} exists and is no model"):
        await quartet.services.critic.save(str(tmp_path), 60)
    with pytest.raises(InvalidArgument, match="path: required"):
        await quartet.services.critic.save("", 60)
    with pytest.raises(InvalidArgument, match=r"path: .*/diary.txt/model cannot be written: Not a directory"):
        await quartet.services.critic.save(str(tmp_path / "diary.txt" / "model"), 60)
    assert (tmp_path / "diary.txt").read_text() == "dear diary"
