"""Recomputed activations are asked for by the name that the installed transformers has for it."""

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaModel
from transformers.modeling_layers import GradientCheckpointingLayer

from quartet.learner.recomputed import recompute_activations
from quartet.models.scalar import ScalarModel


class Before(nn.Module):
    """A model of transformers before 5.23."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def gradient_checkpointing_enable(self) -> None:
        self.asked.append("gradient")


class Since(Before):
    """A model of transformers from 5.23 on, which has both names."""

    def activation_checkpointing_enable(self) -> None:
        self.asked.append("activation")


@pytest.mark.parametrize(("kind", "asked"), [(Before, "gradient"), (Since, "activation")])
def test_the_newest_name_is_called_alone(kind: type[Before], asked: str) -> None:
    model = kind()
    recompute_activations(model)
    assert model.asked == [asked]


@pytest.mark.parametrize("head", [False, True])
def test_each_layer_recomputes(head: bool) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    body = LlamaModel(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2))
    recompute_activations(ScalarModel(body, bias=False) if head else body)
    layers = [each for each in body.modules() if isinstance(each, GradientCheckpointingLayer)]
    assert [each.gradient_checkpointing for each in layers] == [True] * 2
