"""Samples as on a GPU: the sampler of vLLM's model runner V2 with its own kernels, in Triton's interpreter on a CPU.

`python -m tests.unit.gpu_sampler FOLDER` prints what it made of REQUESTS, for the model in FOLDER, as JSON.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from services.rollout.config import RolloutConfig
from services.rollout.sample import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams

EOS, STOP = 2, 9
PROMPT = [1, 20, 21]


@dataclass(frozen=True)
class Request:
    """A request at the moment when its next token is drawn."""

    sampling: Sampling
    seed: int
    begun: int = 0
    """Tokens that came from another replica, which count as part of the prompt here."""
    sampled: int = 0
    """Tokens since then."""


_LONG = Sampling(max_new_tokens=12, min_new_tokens=5, stop_token_ids=(STOP,))
REQUESTS = [
    Request(Sampling(max_new_tokens=12), seed=5),
    Request(Sampling(max_new_tokens=12, temperature=0.0), seed=6),
    Request(Sampling(max_new_tokens=12, temperature=0.7), seed=7),
    Request(_LONG, seed=8),
    Request(_LONG, seed=9, sampled=4),
    Request(_LONG, seed=9, sampled=5),
    Request(_LONG, seed=9, begun=2, sampled=2),
    Request(_LONG, seed=9, begun=2, sampled=3),
    Request(Sampling(max_new_tokens=12, min_new_tokens=12, ignore_eos=True), seed=10),
]


def logits(rows: int) -> torch.Tensor:
    """One row of logits for each request, [REQUESTS, rows]: the largest are padding, then ends. Those of requests 4
    to 7 are the same."""
    made = torch.randn((len(REQUESTS), rows), generator=torch.Generator().manual_seed(0)) * 2
    made[:, 64:] += 20
    made[:, EOS], made[:, STOP] = 12.0, 11.0
    made[4:8] = torch.randn(rows, generator=torch.Generator().manual_seed(1))
    made[4:8, 64:] += 20
    return made


def parameters(request: Request) -> "SamplingParams":
    """vLLM's parameters, as its front end completes them for a model with this end."""
    from services.rollout.vllm.requests import _params

    params = _params(request.sampling, request.begun, request.seed)
    params.update_from_generation_config({"eos_token_id": [EOS]}, EOS)
    return params


def prompt(request: Request) -> list[int]:
    """Ids of the prompt that vLLM is given."""
    return PROMPT + [30] * request.begun


def make_config(folder: Path) -> tuple[RolloutConfig, Any]:
    """Ours, and as much of vLLM's as processors and samplers read."""
    from types import SimpleNamespace

    config = RolloutConfig.parse({"model": str(folder), "kv_cache_mib": 64, "dtype": "float32"}, "rollout")
    model = SimpleNamespace(tokenizer=str(folder), logits_processors=None, runner_type="generate")
    scheduler = SimpleNamespace(max_num_seqs=len(REQUESTS))
    return config, SimpleNamespace(
        model_config=model, scheduler_config=scheduler, speculative_config=None, reasoning_config=None
    )


def make_states(rows: int, slots: int) -> Any:
    """The real state of V2's requests, on a CPU: it takes memory that a GPU reads in place for missing."""
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.states import RequestState

    before, buffer_utils.is_uva_available = buffer_utils.is_uva_available, lambda: False
    try:
        return RequestState(slots, 32, 64, 0, rows, torch.device("cpu"))
    finally:
        buffer_utils.is_uva_available = before


def sampled(folder: Path, rows: int, order: list[int]) -> dict[str, Any]:
    """Ids, log-probs and logits of V2, by number, when the requests of these numbers come in this order."""
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from services.rollout.vllm.arguments import engine_args

    buffer_utils.is_uva_available = lambda: False
    config, vllm_config = make_config(folder)
    arguments = engine_args(config)
    states = make_states(rows, len(order))
    processors = build_custom_logits_processors(vllm_config, states, False, arguments.logits_processors or ())
    sampler = Sampler(
        vllm_config,
        len(order),
        rows,
        torch.device("cpu"),
        states,
        logprobs_mode=arguments.logprobs_mode,
        custom_logits_processors=processors,
    )
    for number in order:
        request = REQUESTS[number]
        ids = prompt(request)
        states.add_request(str(number), len(ids), ids + [40] * request.sampled, 0, 12)
        sampler.add_request(states.req_id_to_index[str(number)], parameters(request))
    states.apply_staged_writes()
    sampler.apply_staged_writes()
    slots = np.asarray([states.req_id_to_index[str(number)] for number in order], np.int32)
    lengths = [len(prompt(REQUESTS[number])) + REQUESTS[number].sampled for number in order]
    on_device = torch.from_numpy(slots)
    ids, processed = sampler.sample(
        logits(rows)[order],
        on_device,
        on_device,
        slots,
        torch.tensor(lengths) - 1,
        torch.full((len(order),), 40),
        torch.zeros(len(order), dtype=torch.int32),
        np.asarray(lengths, np.int32),
        return_logprobs=True,
    )
    scores = compute_topk_scores(processed, 0, ids)
    by_number = torch.tensor(order).argsort()
    return {
        "ids": ids[by_number].tolist(),
        "logprobs": scores.logprobs[by_number, 0].tolist(),
        "logits": processed[by_number].tolist(),
    }


def main() -> None:
    """Prints what comes of the requests in two orders."""
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    import vllm.platforms as platforms

    assert platforms.current_platform.device_type == "cpu"
    # vLLM's CPU build would replace Triton by a stand-in whose kernels do nothing.
    matches, platforms.vllm_version_matches_substr = platforms.vllm_version_matches_substr, lambda name: False
    import vllm.triton_utils

    platforms.vllm_version_matches_substr = matches
    assert vllm.triton_utils.HAS_TRITON
    folder, rows = Path(sys.argv[1]), int(sys.argv[2])
    forth = list(range(len(REQUESTS)))
    print(json.dumps([sampled(folder, rows, forth), sampled(folder, rows, forth[::-1])]))


if __name__ == "__main__":
    main()
