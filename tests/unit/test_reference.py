"""The reference's log-probs against single sequences."""

from pathlib import Path

import numpy as np
import pytest
import torch

from services.reference.logprobs import FrozenModel, Question
from tests.unit.naive import PROMPTS, RESPONSES, arrays, chosen, distributions, language_model


@pytest.mark.parametrize("batch_tokens", [1, 12, 1000])
def test_each_response_at_its_own_temperature_and_in_its_own_place(policy_folder: Path, batch_tokens: int) -> None:
    frozen = FrozenModel(str(policy_folder), "float32", batch_tokens, torch.device("cpu"))
    temperatures = [0.5, 2.0, 0.5, 1.0]
    questions = [Question(*row) for row in zip(arrays(PROMPTS), arrays(RESPONSES), temperatures, strict=True)]
    found = frozen.logprobs(questions)
    assert [row.dtype for row in found] == [np.float32] * 4
    with torch.no_grad():
        for index, temperature in enumerate(temperatures):
            expected = chosen(distributions(language_model(policy_folder), temperature))[index]
            assert found[index].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_the_model_is_frozen(policy_folder: Path) -> None:
    frozen = FrozenModel(str(policy_folder), "bfloat16", 1000, torch.device("cpu"))
    parameters = list(frozen.model.parameters())
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in parameters)
    assert not frozen.model.training
    assert frozen.logprobs([]) == []
