"""Weights that DeepSpeed's AutoTP divides among ranks: which models it can divide, and each weight whole again."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import distributed, nn

from quartet.config.base import ConfigError
from quartet.ranks.ranks import Ranks
from quartet.seams.deepspeed import divisible_styles, division_of

HEADS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Names, in a model's configuration, of the sizes along which its layers are divided."""


def check_divisible(module: nn.Module, size: int) -> None:
    """Raises ConfigError unless a transformers model can be divided among `size` ranks: it needs a plan that
    DeepSpeed can carry out (`base_model_tp_plan`), and heads and widths that are multiples of `size`."""
    config: Any = module.config
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan or not divisible_styles().issuperset(plan.values()):
        raise ConfigError(
            f"tensor_parallel.size: DeepSpeed has no plan by which to divide {config.model_type}; set it to 1"
        )
    for name in HEADS:
        count = getattr(config, name, None)
        if count is not None and count % size:
            raise ConfigError(f"tensor_parallel.size: should divide the model's {name} {count}, got {size}")


def check_divided(module: nn.Module) -> None:
    """Raises ConfigError unless DeepSpeed divided at least one parameter, and each into plain pieces along one
    dimension."""
    divided = {name: division for name, p in module.named_parameters() if (division := division_of(p)) is not None}
    odd = [
        name for name, division in divided.items() if not division["partition_sizes"] or division["sub_param_sizes"]
    ]
    if odd or not divided:
        what = f"divides {odd[0]} along more than one dimension" if odd else "cannot divide this model"
        raise ConfigError(f"tensor_parallel.size: DeepSpeed {what}; set it to 1")


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """The parameter's shape in the undivided model."""
    division = division_of(parameter)
    if division is not None:
        return torch.Size(division["logical_shape"])
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def whole(parameter: nn.Parameter) -> torch.Tensor:
    """The whole tensor of a divided parameter, gathered from the ranks that hold its pieces; each of them calls this.
    An undivided parameter is returned as it is. With ZeRO 3 the piece has to be gathered before."""
    division = division_of(parameter)
    if division is None:
        return parameter.detach()
    from deepspeed.utils import groups

    sizes, dim = division["partition_sizes"], division["partition_dim"]
    mine = parameter.detach().movedim(dim, 0)
    # Collectives need pieces of equal shape.
    padded = mine.new_zeros(max(sizes), *mine.shape[1:])
    padded[: len(mine)] = mine
    pieces = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(pieces, padded, group=groups.get_tensor_model_parallel_group())
    joined = torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)])
    return joined.movedim(0, dim).contiguous()


def data_parallel(ranks: Ranks, size: int) -> Ranks:
    """The place of this rank's copy of the model among all copies, each divided among `size` ranks; `group` holds the
    ranks with the same pieces. DeepSpeed's engine has to exist."""
    from deepspeed.utils import groups

    group = groups.get_data_parallel_group()
    return replace(ranks, rank=ranks.rank // size, world_size=ranks.world_size // size, group=group)


def total_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """[], norm of the gradient of the whole model, each number of it counted once. All ranks of a copy call it."""
    kept = [parameter for parameter in parameters if parameter.grad is not None]
    divided = [parameter.grad for parameter in kept if division_of(parameter)]
    alike = nn.utils.get_total_norm([parameter.grad for parameter in kept if not division_of(parameter)])
    if not divided:
        return alike
    from deepspeed.utils import groups

    square = nn.utils.get_total_norm(divided) ** 2
    distributed.all_reduce(square, group=groups.get_tensor_model_parallel_group())
    return (alike**2 + square).sqrt()
