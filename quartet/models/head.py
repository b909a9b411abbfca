"""A language model that computes log-probs inside its head, so that its logits never exist as a whole."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quartet.models.sharing import take
from quartet.models.tiles import PLAIN, Kernels, Softmax, linear_logprobs, tile_elements


@dataclass(frozen=True, slots=True)
class Asked:
    """The log-probs that a model is asked for, at C columns of its R rows."""

    softmax: Softmax
    """The distribution."""
    ids: Tensor
    """[R, C] int64, the tokens."""
    early: Tensor | None
    """[R, C] bool, True where `softmax.ends` have probability 0; None: nowhere."""
    entropy: bool
    """True if the entropy is asked for too."""
    repeated: bool = False
    """True if a column may be among them several times."""


class LogprobHead(nn.Linear):
    """An output layer that computes log-probs if asked for them, and logits otherwise."""

    cap: float | None = None
    """The model's cap of its logits."""
    kernels: Kernels = PLAIN
    """The functions of a tile's numbers."""

    def forward(self, input: Tensor, asked: Asked | None = None) -> Tensor:  # nn.Linear's, and a question
        """[R, C, H] -> [R, C, V], the logits without the cap; or [R, C, 1 or 2], as linear_logprobs answers."""
        if asked is None:
            return super().forward(input)
        return linear_logprobs(
            input,
            self.weight,
            asked.ids,
            replace(asked.softmax, cap=self.cap),
            bias=self.bias,
            early=asked.early,
            entropy=asked.entropy,
            kernels=self.kernels,
        )


def answer_in_head(model: Any) -> None:
    """Lets the model take a keyword `asked` (Asked) beside those of transformers and `logits_to_keep` [C].

    Its answer is then the tensor of its head, a LogprobHead. It answers with its logits, as if nothing was asked, if
    these make a single tile, for which torch's own softmax is faster; and if its head is not a plain linear layer
    whose logits are the model's but for a cap, or is replaced later (adapters, tensor parallelism).
    """
    plain, head = model.forward, model.get_output_embeddings()
    # A function of the layer's own moves its inputs between devices.
    if type(head) is nn.Linear and "forward" not in vars(head):
        known, cap = _cap(model, head)
        if known:
            head.__class__, head.cap = LogprobHead, cap

    def forward(*inputs: Any, asked: Asked | None = None, **options: Any) -> Any:
        head = model.get_output_embeddings()
        if asked is None:
            return plain(*inputs, **options)
        columns = options.pop("logits_to_keep")
        if type(head) is not LogprobHead or _is_small(head, asked):
            if asked.repeated and columns.is_cpu:
                return _at_repeated(plain, columns, inputs, options)
            return plain(*inputs, logits_to_keep=columns, **options)
        hidden = model.get_decoder()(*inputs, **options).last_hidden_state
        return head(take(hidden, columns), asked)

    model.forward = forward


def _at_repeated(plain: Callable[..., Any], columns: Tensor, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The model's answer with logits of these columns, computed once for columns that are the same; see `take`."""
    different = columns.unique()
    answer = plain(*inputs, logits_to_keep=different, **options)
    answer.logits = take(answer.logits, torch.searchsorted(different, columns))
    return answer


def _is_small(head: LogprobHead, asked: Asked) -> bool:
    return bool(asked.ids.numel() * head.out_features <= tile_elements(asked.ids.device))


class _States:
    """A decoder's output of which only the states are there."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, at: int) -> Tensor:
        return (self.last_hidden_state,)[at]


@torch.no_grad()
def _cap(model: Any, head: nn.Linear) -> tuple[bool, float | None]:
    """Finds out, by a call on states that are drawn in place of the decoder's, if the model's logits are its head's,
    capped or not; returns True if so, and the cap."""
    config, decoder = model.config.get_text_config(), model.get_decoder()
    if "forward" in vars(decoder):  # a function of its own, as for the head, which is to stay
        return False, None
    cap = getattr(config, "final_logit_softcapping", None)
    drawn = torch.randn(1, 1, head.in_features, generator=torch.Generator().manual_seed(0))
    states = drawn.to(head.weight.device, head.weight.dtype)
    decoder.forward = lambda *_, **__: _States(states)
    try:
        actual = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=states.device), use_cache=False).logits
    except Exception:  # a model that asks its decoder for more
        return False, None
    finally:
        del decoder.forward
    expected = head(states)
    if cap is not None:
        expected = torch.tanh(expected / cap) * cap
    return actual.shape == expected.shape and torch.allclose(actual, expected), cap
