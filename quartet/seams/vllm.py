"""Private names of vLLM: the layerwise reload below its weight transfer, packed copies of weights on a CPU, spans of
versions of responses that are not finished, the threads that render, the texts of tokens beside log-probs, the names
of its workers' memory on a CPU, and the registry of transfer engines.

The classes that stand in for vLLM's own inside its engine (its scheduler, logits processors, worker extension) are in
services/rollout/vllm.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import linear
from vllm import __version_tuple__
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload.layerwise import (
    LOADING_LAYERS,
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.v1.engine import logprobs

VERSIONS = ">=0.32,<0.34"
NEWER = __version_tuple__ >= (0, 33)
"""True from 0.33 on, where some serving classes take other arguments."""


def adapters_at(place: int) -> LoRARequest:
    """Names, for a request, the adapters that a push brought to one of a worker's places. No file holds them."""
    return LoRARequest(f"policy-{place}", 1 + place, "pushed")


def register_engine(name: str, module: str, kind: str) -> None:
    """Registers a class as the weight-transfer engine of that name; further calls do nothing."""
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, module, kind)


def unname_workers_memory(folder: Path = Path("/dev/shm")) -> None:
    """Takes their names from the files in which the workers of an engine on a CPU meet in each step; all of them have
    the files open. vLLM leaves the names, and with them some MiB for each worker, however its processes end."""
    if engine := os.environ.get("VLLM_DIST_IDENT"):
        for path in folder.glob(f"{engine}-*-cpushm_*"):
            path.unlink(missing_ok=True)  # another worker may do the same


def end_late_renders(renderer: Any) -> None:
    """Has the threads of a renderer end when a chat template has taken too long. vLLM only gives it others then: the
    late ones would go on for as long as the template does, and share the interpreter with all that the process does.
    """
    replace = renderer._replace_executor

    def replaced() -> None:
        late = list(renderer._executor._inner._threads)
        replace()
        for thread in late:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))

    renderer._replace_executor = replaced


def decode_tokens_once() -> None:
    """Has vLLM decode a token's text for its first log-prob only. It would for each, on the event loop, which takes
    longer than all else that it does with log-probs."""
    decode = logprobs.convert_ids_list_to_tokens
    if hasattr(decode, "__wrapped__"):
        return
    known: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()

    @functools.wraps(decode)
    def texts(tokenizer: Any, token_ids: list[int]) -> list[str]:
        own = known.setdefault(tokenizer, {})
        new = list(set(token_ids) - own.keys())
        own.update(zip(new, decode(tokenizer, new), strict=True))
        return [own[token] for token in token_ids]

    logprobs.convert_ids_list_to_tokens = texts


def open_layers(model: torch.nn.Module) -> None:
    """Opens all layers for new weights, which are then loaded elsewhere and copied into place."""
    initialize_layerwise_reload(model)


def close_layers(model: torch.nn.Module, model_config: Any) -> None:
    """Copies into place what is still open, and closes all layers."""
    finalize_layerwise_reload(model, model_config)


def drop_layers(model: torch.nn.Module) -> None:
    """Gives layers whose loading was interrupted their own memory back; vLLM would keep their temporary tensors."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
    LOADING_LAYERS.clear()


def got_nothing(layer: torch.nn.Module) -> bool:
    """True if the layer is open, has weights and got none so far."""
    info = get_layerwise_info(layer)
    return bool(info.can_load() and info.load_numel_total and not info.load_numel)


def packed_copies(model: torch.nn.Module) -> dict[Any, Any]:
    """Layer -> the packed copy of its weights that vLLM's CPU build computes with."""
    computing = {module: getattr(module, "cpu_linear", linear) for module in model.modules()}
    return {module: packed for module, packed in computing.items() if packed is not linear}


def pack_again(copies: dict[Any, Any]) -> None:
    """Renews the packed copies that are still the ones of `packed_copies`, from their layers' weights."""
    for module, before in copies.items():
        if module.cpu_linear is before and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def expert_kernels(model: torch.nn.Module) -> dict[Any, Any]:
    """Method that runs a mixture of experts -> its kernel."""
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    return {method: method.moe_kernel for method in methods if getattr(method, "moe_kernel", None) is not None}


def set_kernels(kernels: Mapping[Any, Any]) -> None:
    """Gives methods their kernels; None: none yet, as before the first load."""
    for method, kernel in kernels.items():
        method.moe_kernel = kernel


def spans_so_far(llm: Any, name: str) -> Any:
    """The spans of versions of a request that is not finished, given by the name that its caller gave it. vLLM hands
    them out with the end of a response, but notes them whenever tokens come."""
    processor = llm.output_processor
    [internal] = processor.external_req_ids[name]
    return processor.request_states[internal]._weight_version_spans()


def waits(llm: Any, name: str) -> bool:
    """True if a request is in the engine and none of its tokens has come; the name is that of `spans_so_far`."""
    return name in llm.output_processor.external_req_ids and not spans_so_far(llm, name)


async def drain(llm: Any) -> None:
    """Pauses an engine once all its requests have ended, and clears its caches; requests that come meanwhile wait
    until it goes on. vLLM's own pause that waits refuses these from 0.33 on."""
    await llm.engine_core.pause_scheduler_async("wait", True)


def replace_requests(runner: Any, make: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replaces the requests of vLLM's older model runner; the newer one has none, and keeps what it has."""
    if hasattr(runner, "requests"):
        runner.requests = make(runner.requests)


def keep_adapters(runner: Any) -> None:
    """Has a worker keep its adapters at the end of a weight update. vLLM removes them, as it takes each update to
    bring other weights of the model itself."""
    runner.reset_lora_state = lambda: None


def load_adapters(runner: Any, tensors: Mapping[str, torch.Tensor], rank: int, place: int) -> list[str]:
    """Puts adapters in one of a worker's places, for those that it has there.

    Args:
        runner: the worker's model runner.
        tensors: each A and B, as `scaled` (quartet/learner/lora.py) gives them.
        rank: the rank of each adapter.
        place: the place, by which `adapters_at` names them.

    Returns:
        The layers among them that have no place for an adapter.
    """
    manager, number = runner.lora_manager._adapter_manager, adapters_at(place).lora_int_id
    names = getattr(manager.model, "hf_to_vllm_mapper", None)
    adapters = LoRAModel.from_lora_tensors(
        number,
        dict(tensors),
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # as they are scaled already
        device=str(manager.device),
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=names and names.get_rename_mapper(),
    )
    manager.remove_adapter(number)
    manager.add_adapter(adapters)
    manager.activate_adapter(number)
    homeless = sorted(adapters.loras.keys() - manager.modules.keys())
    adapters.loras.clear()  # the model has copies
    return homeless


def forget_update(worker: Any) -> bool:
    """Makes a worker count its weight update as closed, without closing it; True if one was open."""
    was_open = bool(getattr(worker, "_weight_update_active", False))
    worker._weight_update_active = False
    return was_open
