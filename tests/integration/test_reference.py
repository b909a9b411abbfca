"""The reference service over gRPC."""

import asyncio

import grpc
import numpy as np
import pytest

from protos import reference_pb2
from quartet.wire.codec import unpack_floats
from quartet.wire.identity import model_hash
from tests import plain
from tests.cluster import Quartet, refused
from tests.integration.malformed import MALFORMED, ONE
from tests.models import MAX_LENGTH, ROWS, WORDS
from tests.trajectories import of

METHOD = "/quartet.v1.Reference/Logprobs"


async def ask(quartet: Quartet, **fields: object) -> reference_pb2.LogprobsResponse:
    request = reference_pb2.LogprobsRequest(**fields)  # type: ignore[arg-type]
    return await quartet.call(METHOD, request, reference_pb2.LogprobsResponse, "reference")


async def test_info_describes_the_model(quartet: Quartet) -> None:
    model = (await quartet.reference.info(30)).model
    assert (model.name, model.dtype) == (quartet.policy.name, "float32")
    assert (model.vocab_size, model.max_length) == (ROWS, MAX_LENGTH)
    assert model.model_hash == model_hash(quartet.policy)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_transformers(quartet: Quartet, temperature: float) -> None:
    prompts, responses = plain.random_pairs(40)
    actual = await quartet.reference.logprobs(of(prompts, responses), temperature=temperature, timeout_s=60)
    expected = plain.logprobs(plain.language_model(quartet.policy), prompts, responses, temperature, len(WORDS))
    assert plain.furthest([actual], [np.concatenate(expected)]) < 1e-4


async def test_temperature_is_one_unless_given(quartet: Quartet) -> None:
    prompts, responses = plain.random_pairs(4)
    reply = await ask(quartet, trajectories=of(prompts, responses).pack())
    expected = plain.logprobs(plain.language_model(quartet.policy), prompts, responses, vocabulary=len(WORDS))
    assert plain.furthest([unpack_floats(reply.ref_logprobs, "ref_logprobs")], [np.concatenate(expected)]) < 1e-4


async def test_calls_that_share_a_batch_keep_their_own_answers(quartet: Quartet) -> None:
    """Different temperatures and lengths, all at once."""
    model = plain.language_model(quartet.policy)
    pairs = [plain.random_pairs(3, seed, longest=1 + 5 * seed) for seed in range(8)]
    temperatures = [0.5 + 0.25 * (call % 3) for call in range(8)]
    answers = await asyncio.gather(
        *(
            quartet.reference.logprobs(of(*pair), temperature=temperature, timeout_s=60)
            for pair, temperature in zip(pairs, temperatures, strict=True)
        )
    )
    for pair, temperature, actual in zip(pairs, temperatures, answers, strict=True):
        expected = plain.logprobs(model, *pair, temperature, len(WORDS))
        assert plain.furthest([actual], [np.concatenate(expected)]) < 1e-4


async def test_two_thousand_pairs_in_one_call(quartet: Quartet) -> None:
    """Batched by length inside, answered in the order asked."""
    prompts, responses = plain.random_pairs(20)
    actual = await quartet.reference.logprobs(of(prompts * 100, responses * 100), temperature=1.0, timeout_s=120)
    expected = plain.logprobs(plain.language_model(quartet.policy), prompts, responses, vocabulary=len(WORDS))
    assert plain.furthest([actual], [np.concatenate(expected * 100)]) < 1e-4


@pytest.mark.parametrize("kind", MALFORMED)
async def test_malformed_trajectories_are_refused_by_name(quartet: Quartet, kind: str) -> None:
    wrong, message = MALFORMED[kind]
    code, details = await refused(ask(quartet, trajectories=wrong))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "trajectories" + message in details
    assert len((await ask(quartet, trajectories=ONE)).ref_logprobs) == 4


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan")])
async def test_temperature_must_be_positive(quartet: Quartet, temperature: float) -> None:
    code, details = await refused(ask(quartet, trajectories=ONE, temperature=temperature))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"temperature: {temperature:g}; must be more than 0" in details
