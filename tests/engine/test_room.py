"""A KV cache that is too small for all that is asked of the engine: it is used, and nothing is preempted."""

import os
from pathlib import Path
from typing import Any

import pytest

from services.rollout.config import RolloutConfig
from tests import plain
from tests.engine_process import EngineProcess
from tests.models import MAX_LENGTH, make_policy

PROMPTS, _ = plain.random_pairs(48, seed=21, longest=20)
LONGEST = MAX_LENGTH - 20


def sampled(folder: Path, ours: bool) -> tuple[list[int], int, int]:
    """Lengths of the responses, number of preemptions, and the most requests that ran, with Quartet's scheduler or
    vLLM's."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from services.rollout.vllm.arguments import engine_args
    from services.rollout.vllm.scheduler import WholeResponseScheduler

    seen = {"preempted": 0, "running": 0}

    class Counting(WholeResponseScheduler if ours else AsyncScheduler):  # type: ignore[misc]
        def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
            seen["preempted"] += 1
            super()._preempt_request(*args, **kwargs)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            scheduled = super().schedule(*args, **kwargs)
            seen["running"] = max(seen["running"], len(self.running))
            return scheduled

    config = {"model": str(folder), "dtype": "float32", "max_length": MAX_LENGTH, "kv_cache_mib": 1}
    given = dict(vars(engine_args(RolloutConfig.parse(config, "rollout"))))
    for name in ("enable_log_requests", "weight_transfer_config", "worker_extension_cls"):
        given.pop(name)
    llm = LLM(**given | {"scheduler_cls": Counting, "block_size": 32})
    # Half of them end early, as responses do, though all may come to the longest.
    params = [
        SamplingParams(max_tokens=LONGEST, temperature=1.0, seed=i, ignore_eos=i % 2 == 0)
        for i in range(len(PROMPTS))
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt.tolist()} for prompt in PROMPTS], params, use_tqdm=False)
    return [len(output.outputs[0].token_ids) for output in outputs], seen["preempted"], seen["running"]


# vLLM's own is what ours is compared with, and changes with vLLM's version only.
@pytest.mark.parametrize("ours", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["quartet", "vllm"])
async def test_requests_are_preempted_by_vllms_scheduler_alone(
    tmp_path: Path, engine: EngineProcess, ours: bool
) -> None:
    folder = make_policy(tmp_path / "policy", kind="llama", tied=False, seed=5)
    lengths, preempted, running = await engine.call(sampled, folder, ours)
    assert len(lengths) == len(PROMPTS)
    assert set(lengths[::2]) == {LONGEST}
    # 1024 tokens are eight of the longest; more run, as those that have begun before end before.
    assert running > 8
    assert (preempted == 0) == ours
