"""The seam with vLLM, against its classes. The reload of layers, with vLLM's own machinery:
services/rollout/vllm/test_vllm_loading.py and test_vllm_experts.py; spans and the generators of requests:
test_requests.py there, and tests/engine/test_resumed.py."""

import inspect
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.worker import gpu_worker

from quartet.seams import vllm


def test_an_engine_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightTransferEngineFactory, "_registry", {})
    for _ in range(2):
        vllm.register_engine("mine", "os", "PathLike")
    assert list(WeightTransferEngineFactory._registry) == ["mine"]


def test_a_layer_that_is_not_open_has_got_what_it_needs() -> None:
    layer = torch.nn.Linear(1, 1)
    assert not get_layerwise_info(layer).can_load()
    assert not vllm.got_nothing(layer)
    vllm.drop_layers(layer)


def test_packed_copies_that_were_renewed_by_the_load_are_left_alone() -> None:
    packed: list[str] = []

    def layer(name: str) -> torch.nn.Module:
        made: Any = torch.nn.Linear(1, 1)
        made.cpu_linear, made.quant_method = (
            object(),
            SimpleNamespace(process_weights_after_loading=lambda module: packed.append(name)),
        )
        return made  # type: ignore[no-any-return]

    model = torch.nn.ModuleList([layer("stays"), layer("renewed"), torch.nn.Linear(1, 1)])
    copies = vllm.packed_copies(model)
    assert len(copies) == 2
    model[1].cpu_linear = object()  # type: ignore[assignment]
    vllm.pack_again(copies)
    assert packed == ["stays"]


def test_vllm_notes_where_versions_change_before_a_response_ends() -> None:
    assert callable(RequestState._weight_version_spans)
    kept = inspect.getsource(OutputProcessor.__init__)
    assert "self.external_req_ids" in kept
    assert "self.request_states" in kept


def test_a_worker_opens_one_update_at_a_time_by_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_worker, "set_current_vllm_config", lambda _: nullcontext())
    worker: Any = object.__new__(gpu_worker.Worker)
    worker.vllm_config = None
    worker.weight_transfer_engine = SimpleNamespace(start_weight_update=lambda: None)
    worker._check_weight_transfer_engine = lambda: None
    assert not vllm.forget_update(worker)
    worker.start_weight_update()
    with pytest.raises(RuntimeError):
        worker.start_weight_update()
    assert vllm.forget_update(worker)
    worker.start_weight_update()
