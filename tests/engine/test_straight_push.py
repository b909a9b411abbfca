"""Pushes straight into the memory of vLLM's own models: the first shows where each weight goes, and the engine
computes with what the later ones brought.

vLLM's CPU build packs weights, so that nothing can be copied straight into place. Here it computes with plain ones,
as on a GPU.
"""

import itertools
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from quartet.seams import vllm as seam
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.sender import make_sender
from services.rollout.config import RolloutConfig
from tests import plain
from tests.engine.test_families import CLOSE, each
from tests.engine_process import EngineProcess
from tests.families import FAMILIES

PROMPTS, _ = plain.random_pairs(5, seed=3, longest=30)
BUCKET_BYTES = 100_000
PLACE = {"rank": 1, "world_size": 2, "membership": 1, "stall_s": 20.0}
PACKED = {"qwen3-moe"}
"""Families whose weights the CPU build packs all the same: they are loaded layer by layer each time."""


def logprobs(llm: Any) -> list[np.ndarray]:
    """The engine's log-probs of each prompt's tokens but the first."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids.tolist()} for ids in PROMPTS], params, use_tqdm=False)
    return [
        np.asarray(
            [given[int(token)].logprob for given, token in zip(found.prompt_logprobs[1:], ids[1:], strict=True)]
        )
        for found, ids in zip(outputs, PROMPTS, strict=True)
    ]


def pushes(folder: Path, rounds: list[dict[str, torch.Tensor]]) -> list[tuple[list[np.ndarray], int]]:
    """Pushes each round's weights; the engine's log-probs then, and how often its layers were opened."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.model_executor.layers import utils

    from services.rollout.vllm.arguments import engine_args

    open_layers = Mock(side_effect=seam.open_layers)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "dispatch_cpu_unquantized_gemm", plain.product)
        patch.setattr(seam, "open_layers", open_layers)
        config = {"model": str(folder), "dtype": "float32", "max_length": 128, "kv_cache_mib": 16}
        given = dict(vars(engine_args(RolloutConfig.parse(config, "rollout"))))
        given.pop("enable_log_requests")
        llm = LLM(**given)
        manifest = Manifest.of(rounds[0], BUCKET_BYTES)
        sender = make_sender("ipc", manifest, host="127.0.0.1", stall_s=20.0)
        joining = {"backend": "ipc", "senders": [["", sender.rendezvous()]], **PLACE}
        llm.collective_rpc("init_weight_transfer_engine", args=(joining,))
        fields = {name: [*getattr(manifest, name)] for name in ("names", "dtypes", "shapes")}
        for version, weights in enumerate(rounds, 1):
            sender.load(weights.items(), version)
            open_layers.reset_mock()
            llm.collective_rpc("start_weight_update")
            llm.collective_rpc("update_weights", args=({**fields, "bucket_bytes": manifest.bucket_bytes},))
            llm.collective_rpc("finish_weight_update")
            assert llm.collective_rpc("stale_weights") == [[]]
            results.append((logprobs(llm), open_layers.call_count))
        sender.close()
    return results


@pytest.mark.parametrize("name", each("qwen2.5"))
async def test_an_engine_computes_with_weights_that_were_copied_straight(
    engine: EngineProcess, tmp_path: Path, name: str
) -> None:
    folder = FAMILIES[name].make(tmp_path / name)
    model, rounds, wanted = plain.language_model(folder), [], []
    torch.manual_seed(0)
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        rounds.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
        wanted.append(plain.logprobs(model, [ids[:1] for ids in PROMPTS], [ids[1:] for ids in PROMPTS]))
    results = await engine.call(pushes, folder, rounds)
    distances = [plain.furthest(actual, expected) for (actual, _), expected in zip(results, wanted, strict=True)]
    assert max(distances) < CLOSE
    assert min(plain.furthest(one, other) for one, other in itertools.pairwise(wanted)) > 100 * CLOSE
    assert [opened for _, opened in results] == ([1, 1, 1] if name in PACKED else [1, 0, 0])
