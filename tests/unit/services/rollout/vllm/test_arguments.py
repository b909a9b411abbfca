"""The arguments that vLLM is started with."""

from pathlib import Path
from typing import get_args

import pytest
from vllm.config.lora import MaxLoRARanks
from vllm.usage.usage_lib import UsageContext

from quartet.config.base import ConfigError
from services.rollout.config import ROOM, RolloutConfig
from services.rollout.vllm.arguments import FREE_SHARE, check_adapters, eager, engine_args, utilization


def config(folder: Path, **fields: object) -> RolloutConfig:
    return RolloutConfig.parse({"model": str(folder), "kv_cache_mib": 64, "dtype": "float32", **fields}, "rollout")


@pytest.mark.parametrize(("asked", "gpu", "expected"), [(None, True, False), (None, False, True), (True, True, True)])
def test_graphs_are_captured_where_there_is_a_gpu(
    policy_folder: Path, asked: bool | None, gpu: bool, expected: bool
) -> None:
    assert eager(config(policy_folder, enforce_eager=asked), gpu=gpu) is expected


def test_a_step_takes_as_many_tokens_as_vllms_own_offline_engine(policy_folder: Path) -> None:
    """AsyncLLM's own usage context has no defaults in vLLM, which falls back to 2048."""
    given = engine_args(config(policy_folder))
    assert given.max_num_batched_tokens is None
    of_llm, _ = given.get_batch_defaults(world_size=1)
    assert UsageContext.ENGINE_CONTEXT not in of_llm
    assert of_llm[UsageContext.LLM_CLASS] >= 4096
    assert engine_args(config(policy_folder, max_num_batched_tokens=512)).max_num_batched_tokens == 512


def test_blocks_of_the_cache_are_small_on_a_cpu(policy_folder: Path) -> None:
    assert engine_args(config(policy_folder)).block_size == 32


@pytest.mark.parametrize(
    ("fields", "executor"), [({}, "uni"), ({"worker_process": True}, "mp"), ({"tensor_parallel_size": 2}, "mp")]
)
def test_workers_have_processes_of_their_own_if_there_are_several_or_it_is_asked_for(
    policy_folder: Path, fields: dict[str, object], executor: str
) -> None:
    assert engine_args(config(policy_folder, **fields)).distributed_executor_backend == executor


def test_adapters_have_room_for_their_rank_and_none_for_the_head(policy_folder: Path) -> None:
    """vLLM has room for a few ranks only."""
    assert not engine_args(config(policy_folder)).enable_lora
    given = engine_args(config(policy_folder, adapters={"rank": 12}), {"q_proj", "o_proj"})
    assert (given.enable_lora, given.max_lora_rank) == (True, 16)
    assert given.lora_target_modules == ["o_proj", "q_proj"]
    check_adapters(given)
    assert get_args(MaxLoRARanks) == ROOM
    with pytest.raises(ConfigError, match=r"adapters.rank: 513; vLLM takes 512 at most"):
        config(policy_folder, adapters={"rank": 513})
    # Another engine has its own limits.
    assert config(policy_folder, adapters={"rank": 513}, engine="my_engine:start").adapters is not None


def test_every_transport_comes_through_one_engine(policy_folder: Path) -> None:
    for backend in ("auto", "gloo", "ipc", "nccl"):
        given = engine_args(config(policy_folder, weight_backend=backend))
        assert given.weight_transfer_config.backend == "quartet"


def test_an_engine_beside_others_wants_no_share_of_the_gpu_to_be_free(policy_folder: Path) -> None:
    assert utilization(config(policy_folder, gpu_memory_utilization=0.6), gpu=True) == FREE_SHARE
    assert utilization(config(policy_folder, gpu_memory_utilization=0.6, kv_cache_mib=None), gpu=True) == 0.6
    assert utilization(config(policy_folder, gpu_memory_utilization=0.6), gpu=False) == 0.6
