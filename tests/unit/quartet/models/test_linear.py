"""Linear layers by oneDNN, against the same layers in float64."""

from pathlib import Path

import pytest
import torch
from torch import nn

from quartet.models.linear import LEAST_PRODUCTS, OneDnnLinear, use_onednn

ROWS, IN, OUT = 300, 160, 192  # 9.2 million multiplications


@pytest.fixture
def amd(tmp_path: Path) -> Path:
    file = tmp_path / "cpuinfo"
    file.write_text("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 avx512f avx512dq\n")
    return file


def made(cpuinfo: Path, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, OUT, bias=bias))
    use_onednn(model, cpuinfo)
    layer: nn.Linear = model[0]
    return layer


def products(layer: nn.Linear, rows: torch.Tensor) -> int:
    """Counts the products of a call that are oneDNN's."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(rows).sum().backward()
    return sum(event.name == "mkldnn::_linear_pointwise" for event in profile.events())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_results_and_gradients_are_those_of_the_layer(amd: Path, bias: bool, transposed: bool) -> None:
    layer = made(amd, bias=bias)
    exact = nn.Linear(IN, OUT, bias=bias).double()
    exact.load_state_dict(layer.state_dict())
    rows = torch.randn(3, IN, ROWS // 3).transpose(1, 2) if transposed else torch.randn(3, ROWS // 3, IN)
    ours, theirs = rows.detach().requires_grad_(), rows.double().detach().requires_grad_()
    weights = torch.randn(3, ROWS // 3, OUT)
    outputs = [layer(ours), exact(theirs)]
    for output in outputs:
        (output * weights.to(output.dtype)).sum().backward()
    assert outputs[0].shape == (3, ROWS // 3, OUT)
    pairs = [tuple(outputs), (ours.grad, theirs.grad), (layer.weight.grad, exact.weight.grad)]
    if bias:
        pairs.append((layer.bias.grad, exact.bias.grad))
    for actual, expected in pairs:
        assert actual is not None
        assert expected is not None
        assert (actual.double() - expected).abs().max() < 1e-4


def test_it_computes_the_layer_and_its_inputs_gradient(amd: Path) -> None:
    layer = made(amd)
    assert ROWS * layer.weight.numel() >= LEAST_PRODUCTS
    assert products(layer, torch.randn(ROWS, IN, requires_grad=True)) == 2
    assert products(layer, torch.randn(ROWS, IN)) == 1  # no gradient is asked for, as of the first layer's input
    assert products(layer, torch.randn(ROWS // 2, IN)) == 0  # too small
    half = layer.bfloat16()
    assert products(half, torch.randn(ROWS, IN, dtype=torch.bfloat16)) == 0


def test_nothing_is_kept_where_no_gradient_is_asked_for(amd: Path) -> None:
    layer, rows = made(amd), torch.randn(ROWS, IN)
    expected = layer(rows).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            actual = layer(torch.clone(rows))
        assert not actual.requires_grad
        assert torch.equal(actual, expected)


def test_a_frozen_layer_passes_its_gradient_on(amd: Path) -> None:
    layer = made(amd).requires_grad_(False)
    rows = torch.randn(ROWS, IN, requires_grad=True)
    layer(rows).sum().backward()
    assert rows.grad is not None
    assert torch.allclose(rows.grad, layer.weight.sum(0).expand(ROWS, IN), atol=1e-4)
    assert layer.weight.grad is None


@pytest.mark.parametrize("frozen", [True, False])
def test_only_what_the_gradients_need_is_kept(amd: Path, frozen: bool) -> None:
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved.numel()), lambda _: None):
        made(amd).requires_grad_(not frozen)(torch.randn(ROWS, IN, requires_grad=True))
    # A frozen layer's input is needed by none of them.
    assert sorted(kept) == ([IN * OUT] if frozen else [IN * OUT, ROWS * IN])


def test_other_processors_and_other_layers_stay_as_they_are(amd: Path, tmp_path: Path) -> None:
    intel = tmp_path / "intel"
    intel.write_text("vendor_id\t: GenuineIntel\n")
    old = tmp_path / "old"  # without AVX-512, where oneDNN is the slower one
    old.write_text("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2\n")
    for file in (intel, old, tmp_path / "missing"):
        assert type(made(file)) is nn.Linear

    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = nn.ModuleList([Doubled(2, 2), nn.Linear(2, 2)])
    use_onednn(model, amd)
    assert [type(layer) for layer in model] == [Doubled, OneDnnLinear]
    assert isinstance(model[1], nn.Linear)
