"""Padding of a model's vocabulary under both of vLLM's model runners: V1, on CPUs, and V2, on GPUs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.sample.logits_processor import BatchUpdate, build_logitsprocs
from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors

from services.rollout.vllm.arguments import engine_args
from services.rollout.vllm.sampling import TokenizerVocabulary
from tests.models import ROWS, WORDS, make_policy
from tests.unit.gpu_sampler import EOS, REQUESTS, STOP, logits, make_config, make_states, parameters, prompt

CPU = torch.device("cpu")


def loaded_by_v1(folder: Path) -> Any:
    config, vllm_config = make_config(folder)
    return build_logitsprocs(vllm_config, CPU, False, False, engine_args(config).logits_processors or ())


def processed_by_v1(folder: Path) -> torch.Tensor:
    """Logits of all requests after V1's processors and its temperature; [REQUESTS, ROWS]."""
    processors, rows = loaded_by_v1(folder), logits(ROWS)
    added = [
        (index, parameters(request), prompt(request), [40] * request.sampled)
        for index, request in enumerate(REQUESTS)
    ]
    for processor in processors.all:
        processor.update_state(BatchUpdate(len(added), [], added, []))
    for processor in processors.non_argmax_invariant:
        rows = processor.apply(rows)
    # A temperature of 0 takes the largest logit, which both leave as it is.
    return rows / torch.tensor([request.sampling.temperature or 1.0 for request in REQUESTS])[:, None]


def test_the_loaders_of_both_runners_take_the_processor(policy_folder: Path) -> None:
    config, vllm_config = make_config(policy_folder)
    names = engine_args(config).logits_processors
    assert names is not None
    assert [type(processor) for processor in loaded_by_v1(policy_folder).all].count(TokenizerVocabulary) == 1
    states = make_states(ROWS, 2)
    [processor] = build_custom_logits_processors(vllm_config, states, False, names)
    assert type(processor) is TokenizerVocabulary
    assert processor.add_request(0, parameters(REQUESTS[0]))
    # The front end loads it as well, to check the parameters of requests.
    vllm_config.model_config.logits_processors = names
    for is_v2 in (False, True):
        vllm_config.use_v2_model_runner = is_v2
        front: Any = InputProcessor.__new__(InputProcessor)
        front.vllm_config, front.model_config = vllm_config, vllm_config.model_config
        front._build_logits_processors_params_validator()(parameters(REQUESTS[0]))


def test_a_vocabulary_without_padding_needs_no_processor(tmp_path: Path) -> None:
    folder = make_policy(tmp_path / "whole", kind="llama", tied=False, vocab_size=len(WORDS))
    assert engine_args(make_config(folder)[0]).logits_processors is None


@pytest.mark.processes
def test_both_runners_make_the_same_of_every_request(policy_folder: Path) -> None:
    """Padding, ends before their time and temperature; log-probs over the tokens that remain; draws that follow from
    seed and position alone."""
    command = [sys.executable, "-m", "tests.unit.gpu_sampler", str(policy_folder), str(ROWS)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    forth, back = json.loads(done.stdout.splitlines()[-1])
    expected = processed_by_v1(policy_folder)
    for made in (forth, back):
        torch.testing.assert_close(torch.tensor(made["logits"]), expected)
        logprobs = expected.log_softmax(-1)[torch.arange(len(REQUESTS)), torch.tensor(made["ids"])]
        torch.testing.assert_close(torch.tensor(made["logprobs"]), logprobs, atol=1e-5, rtol=0)
        assert max(made["ids"]) < len(WORDS)
    assert forth["ids"] == back["ids"]
    possible = expected.isfinite()
    assert not possible[:, len(WORDS) :].any()
    assert possible[:, EOS].tolist() == [True, True, True, False, False, True, False, True, False]
    assert possible[:, STOP].tolist() == [True, True, True, False, False, True, False, True, True]
    assert forth["ids"][1] == EOS  # the largest that is no padding
    # Of one seed and at one position, wherever the response began.
    assert forth["ids"][5] == forth["ids"][7]
