"""Pushed weights of which vLLM's CPU build keeps packed copies, through its own methods for them: what the layers
compute with afterwards, and which of them are named as stale."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from services.rollout.vllm.loading import Loading

WORDS, WIDTH = 48, 64
SHAPES = {"embeddings": (WORDS, WIDTH), "inner": (WIDTH, WIDTH), "head": (WORDS, WIDTH)}


class Packed(nn.Module):
    """A layer that vLLM's method packs after loading: `inner` as a linear layer, whose weight it frees then, the
    others as embeddings, whose weight it keeps."""

    def __init__(self, name: str) -> None:
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        super().__init__()
        self.weight = nn.Parameter(torch.empty(SHAPES[name]), requires_grad=False)
        self.quant_method: Any = UnquantizedLinearMethod() if name == "inner" else UnquantizedEmbeddingMethod()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.quant_method.apply(self, x)
        return output


class Served(nn.Module):
    """A model that vLLM has loaded with the weights of seed 0, and the loading of pushed ones."""

    def __init__(self, *, tied: bool) -> None:
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        super().__init__()
        self.embeddings, self.inner, self.head = (Packed(name) for name in SHAPES)
        self.sources = dict(zip(SHAPES, SHAPES, strict=True))
        if tied:
            self.head.weight = self.embeddings.weight
            self.sources["head"] = "embeddings"
        record_metadata_for_reloading(self)
        self.load_weights({name: drawn(0)[name] for name in self.sources.values()})
        for name in SHAPES:
            layer = getattr(self, name)
            layer.quant_method.process_weights_after_loading(layer)
        self.loading = Loading(self, SimpleNamespace(dtype=torch.float32), torch.device("cpu"))

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Loads as vLLM's models do: by the weights' own loaders, which a reload wraps."""
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters = {name: getattr(self, name).weight for name in weights}
        for name, tensor in weights.items():
            getattr(parameters[name], "weight_loader", default_weight_loader)(parameters[name], tensor)

    def push(self, seed: int, *names: str) -> None:
        """Brings the weights of these layers."""
        self.loading.take_apart()
        self.load_weights({name: drawn(seed)[name] for name in names})
        self.loading.put_together(lambda: None)

    def seeds(self) -> dict[str, int]:
        """The seed of the weights that each layer computes with, of 0 to 2; -1 if it is none of them."""
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(9))
        found = {}
        for name, source in self.sources.items():
            expected = [functional.linear(x, drawn(seed)[source]) for seed in range(3)]
            fits = [seed for seed in range(3) if torch.allclose(getattr(self, name)(x), expected[seed], atol=1e-4)]
            [found[name]] = fits or [-1]
        return found


def drawn(seed: int) -> dict[str, torch.Tensor]:
    """Random weights of all layers."""
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


def test_a_head_that_shares_pushed_embeddings_is_packed_again() -> None:
    served = Served(tied=True)
    assert served.seeds() == {"embeddings": 0, "inner": 0, "head": 0}
    for seed in (1, 2):
        served.push(seed, "embeddings", "inner")
        assert served.seeds() == {"embeddings": seed, "inner": seed, "head": seed}
        assert served.loading.stale == []
        assert served.head.weight is served.embeddings.weight


@pytest.mark.parametrize("missing", ["embeddings", "inner", "head"])
def test_a_layer_that_got_no_weights_is_named_and_computes_with_its_old_ones(missing: str) -> None:
    served = Served(tied=False)
    served.push(1, *(name for name in SHAPES if name != missing))
    assert served.loading.stale == [missing]
    assert served.seeds() == dict.fromkeys(SHAPES, 1) | {missing: 0}
    served.push(2, *SHAPES)
    assert served.loading.stale == []
    assert served.seeds() == dict.fromkeys(SHAPES, 2)
