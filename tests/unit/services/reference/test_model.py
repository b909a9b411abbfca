"""The reference's log-probs against single sequences."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quartet.columns import Columns
from quartet.models.distribution import Distribution
from quartet.serving.token_call import Asked
from services.reference.config import ReferenceConfig
from services.reference.model import FrozenModel, Question, answers
from tests.learner_batches import logprob_rows
from tests.plain import furthest, language_model, logprobs
from tests.unit.naive import PROMPTS, RESPONSES, arrays, chosen, distributions
from tests.unit.rows import grouped


def make(folder: Path, **options: Any) -> FrozenModel:
    return FrozenModel(ReferenceConfig(model=str(folder), **options), torch.device("cpu"))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("batch_tokens", [1, 12, 1000])
def test_each_response_at_its_own_temperature_and_in_its_own_place(
    policy_folder: Path, batch_tokens: int, packing: bool
) -> None:
    frozen = make(policy_folder, dtype="float32", batch_tokens=batch_tokens, packing=packing)
    assert frozen.model.config._attn_implementation == ("packed_sdpa" if packing else "padded_sdpa")
    temperatures = [0.5, 2.0, 0.5, 1.0]
    whole = Columns.of_pairs(arrays(PROMPTS), arrays(RESPONSES))
    asked = [Question(Asked(whole, row), Distribution(each)) for row, each in enumerate(temperatures)]
    actual = answers(frozen, asked)
    assert [row.dtype for row in actual] == [np.float32] * 4
    with torch.no_grad():
        for index, temperature in enumerate(temperatures):
            expected = chosen(distributions(language_model(policy_folder), temperature))[index]
            assert actual[index].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_prompt_is_computed_once_for_its_responses(policy_folder: Path) -> None:
    frozen, (prompts, responses) = make(policy_folder, dtype="float32", packing=True), grouped(10, size=5)
    computed, forward = [], frozen.model.forward

    def counted(*inputs: Any, **options: Any) -> Any:
        computed.append(options["input_ids"].numel())
        return forward(*inputs, **options)

    frozen.model.forward = counted  # type: ignore[method-assign]
    actual = logprob_rows(frozen, prompts, responses, Distribution())
    assert computed == [2 * 30 + sum(len(response) - 1 for response in responses)]
    assert furthest(actual, logprobs(language_model(policy_folder), prompts, responses)) < 1e-5


def test_the_model_is_frozen(policy_folder: Path) -> None:
    frozen = make(policy_folder, dtype="bfloat16")
    parameters = list(frozen.model.parameters())
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in parameters)
    assert not frozen.model.training
    assert frozen.logprobs(Columns.of_pairs([], []), Distribution()).tolist() == []


def test_an_offloaded_model_gives_the_same_answers_and_its_health_check_moves_nothing(policy_folder: Path) -> None:
    kept, offloaded = make(policy_folder, dtype="float32"), make(policy_folder, offload=True, dtype="float32")
    asked = Columns.of_pairs(arrays(PROMPTS), arrays(RESPONSES)), Distribution()
    assert kept.logprobs(*asked).tolist() == offloaded.logprobs(*asked).tolist()
    kept.check()
    offloaded.check()


def test_a_model_whose_layers_are_spread_gives_the_same_answers(policy_folder: Path) -> None:
    """Over what there is here: the CPU alone."""
    config = ReferenceConfig(model=str(policy_folder), dtype="float32")
    spread = FrozenModel(config, torch.device("cpu"), gpus=2)
    asked = Columns.of_pairs(arrays(PROMPTS), arrays(RESPONSES)), Distribution()
    kept = make(policy_folder, dtype="float32").logprobs(*asked)
    assert kept.tolist() == spread.logprobs(*asked).tolist()
