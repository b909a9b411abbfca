"""Pushed experts, through vLLM's own method and kernel for them, against the mixture computed in plain torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from services.rollout.vllm.loading import Loading

EXPERTS, CHOSEN, HIDDEN = 4, 2, 64
WIDTHS = (64, 48)
"""Widths of an expert: one that vLLM's kernel takes as it is, and one that it pads to a multiple of 32."""


class Experts(nn.Module):
    """A layer as vLLM's `RoutedExperts`: its two weights, and the method that packs them and computes with them."""

    def __init__(self, width: int) -> None:
        from vllm.model_executor.layers.fused_moe import config as fused
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

        super().__init__()
        self.moe_config = fused.FusedMoEConfig(
            num_experts=EXPERTS,
            experts_per_token=CHOSEN,
            hidden_dim=HIDDEN,
            intermediate_size=width,
            num_local_experts=EXPERTS,
            num_logical_experts=EXPERTS,
            activation=fused.MoEActivation.SILU,
            device="cpu",
            routing_method=fused.RoutingMethodType.Renormalize,
            moe_parallel_config=fused.FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=torch.float32,
        )
        self.activation = fused.MoEActivation.SILU
        self.apply_router_weight_on_input = False
        self.global_num_experts, self.expert_map = EXPERTS, None
        self.quant_method: Any = UnquantizedFusedMoEMethod(self.moe_config)
        self.quant_method.create_weights(self, EXPERTS, HIDDEN, width, torch.float32)

    def _expert_routing_tables(self) -> None:
        """Experts on other ranks; there are none."""

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Loads as vLLM's models do: by the weights' own loaders, which a reload wraps."""
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters = dict(self.named_parameters())
        for name, tensor in weights.items():
            getattr(parameters[name], "weight_loader", default_weight_loader)(parameters[name], tensor)

    def forward(self, x: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.quant_method.forward_native(self, x, shares, chosen, None, None)
        return output


def fresh_weights(seed: int, width: int) -> dict[str, torch.Tensor]:
    """Experts as they are pushed: gate above up, [E, 2I, H], and down, [E, H, I]; I is `width`."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"w13_weight": (EXPERTS, 2 * width, HIDDEN), "w2_weight": (EXPERTS, HIDDEN, width)}
    return {name: torch.randn(shape, generator=random) / 8 for name, shape in shapes.items()}


def plainly(weights: dict[str, torch.Tensor], x: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> Any:
    """The mixture's output by its definition, token by token and expert by expert."""
    out = torch.zeros_like(x)
    for token, row in enumerate(x):
        for share, expert in zip(shares[token], chosen[token], strict=True):
            gate, up = (weights["w13_weight"][expert] @ row).chunk(2)
            out[token] += share * (weights["w2_weight"][expert] @ (functional.silu(gate) * up))
    return out


@dataclass
class Served:
    """Experts that vLLM has loaded with the weights of seed 0, and the loading of pushed ones."""

    experts: Experts
    loading: Loading
    width: int

    def push(self, seed: int) -> None:
        self.loading.take_apart()
        self.experts.load_weights(fresh_weights(seed, self.width))
        self.loading.put_together(lambda: None)

    def assert_has(self, seed: int) -> None:
        """Their output is that of the weights of this seed."""
        expected = plainly(fresh_weights(seed, self.width), *tokens())
        torch.testing.assert_close(self.experts(*tokens()), expected, atol=1e-5, rtol=0)


@pytest.fixture(params=WIDTHS)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    with set_current_vllm_config(VllmConfig()):
        experts = Experts(request.param).requires_grad_(False)
        record_metadata_for_reloading(experts)
        experts.load_weights(fresh_weights(0, request.param))
        experts.quant_method.process_weights_after_loading(experts)
        loading = Loading(experts, SimpleNamespace(dtype=torch.float32), torch.device("cpu"))
        yield Served(experts, loading, request.param)


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Five tokens [5, H], and of each the shares of its experts and their numbers [5, 2]."""
    random = torch.Generator().manual_seed(9)
    chosen = torch.tensor([[0, 1], [2, 3], [1, 3], [3, 0], [2, 1]], dtype=torch.int32)
    shares = torch.rand(5, CHOSEN, generator=random)
    return torch.randn(5, HIDDEN, generator=random), shares / shares.sum(1, keepdim=True), chosen


def test_pushed_experts_are_packed_as_those_of_the_first_load(served: Served) -> None:
    served.assert_has(0)
    method = served.experts.quant_method
    memory, kernel = [parameter.data_ptr() for parameter in served.experts.parameters()], method.moe_kernel
    for seed in (1, 2):
        served.push(seed)
        served.assert_has(seed)
    assert [parameter.data_ptr() for parameter in served.experts.parameters()] == memory
    assert method.moe_kernel is kernel


def test_experts_of_a_push_that_broke_off_compute_as_before_and_take_the_next_push(served: Served) -> None:
    served.loading.take_apart()
    served.loading.discard()
    served.assert_has(0)
    served.push(1)
    served.assert_has(1)
