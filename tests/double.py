"""Models in float64 throughout, for comparisons that rounding must not blur."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NARROWING = (torch.Tensor.float, torch.Tensor.to, torch.nn.functional.softmax)


class Double(TorchFunctionMode):
    """Meanwhile what transformers casts to float32 (norms, routers, rotations) stays in float64."""

    def __torch_function__(
        self, function: Any, types: Sequence[Any], arguments: Sequence[Any] = (), options: Any = None
    ) -> Any:
        """The function, but for its casts."""
        options = dict(options or {})
        if function is torch.Tensor.float:
            return arguments[0].to(torch.float64)
        if function in _NARROWING and any(value is torch.float32 for value in (*arguments, *options.values())):
            arguments = [torch.float64 if value is torch.float32 else value for value in arguments]
            options = {name: torch.float64 if v is torch.float32 else v for name, v in options.items()}
        return function(*arguments, **options)
