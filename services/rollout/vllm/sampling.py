"""Changes to vLLM's sampling: ids that the tokenizer does not know, and seeds of responses that go on or whose
prompts are read in pieces."""

from typing import Any, Self

import numpy as np
import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from services.common.models.loading import load_tokenizer
from services.common.wire.identity import vocabulary_size

BEGUN_KEY = "begun"
"""Name in SamplingParams.extra_args: number of tokens that a response had before its request."""


class TokenizerVocabulary(LogitsProcessor):
    """Gives the padding entries of a model's vocabulary probability 0; published models have some (Qwen 2.5: 271)."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._size = vocabulary_size(load_tokenizer(vllm_config.model_config.tokenizer))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Changes the logits [requests, V] in place."""
        logits[:, self._size :] = -torch.inf
        return logits

    def is_argmax_invariant(self) -> bool:
        """False: the largest logit may belong to a padding entry."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Does nothing, since the processor keeps no state."""


class RunnerRequests(dict[str, Any]):
    """The requests of vLLM's model runner, each with a generator for the rest of its response."""

    def __setitem__(self, name: str, state: Any) -> None:
        if state.generator is not None:
            state.generator = continued(state, (state.sampling_params.extra_args or {}).get(BEGUN_KEY, 0))
        super().__setitem__(name, state)


def continue_seeds(runner: Any) -> None:
    """Makes a model runner continue the seeds of responses that it did not begin.

    vLLM's newer runner draws by seed and position, so that nothing is needed. The older one has only `requests`, each
    with a generator that draws once for every token.
    """
    if hasattr(runner, "requests"):
        runner.requests = RunnerRequests(runner.requests)


def continued(state: Any, begun: int) -> torch.Generator:
    """A new request's generator, for a response that had `begun` tokens before.

    On a GPU, where a draw is of no fixed size, it gets another seed, which follows from its own and `begun`.
    Otherwise a token would be drawn as the first one was.
    """
    generator: torch.Generator = state.generator
    if generator.device.type == "cpu":
        return CpuGenerator(state, begun)
    if begun:
        entropy = [generator.initial_seed(), begun]
        generator.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1))
    return generator


class CpuGenerator(torch.Generator):
    """The generator of a request on a CPU, where vLLM draws one integer for each token.

    For each piece of a prompt that does not fit into one step, vLLM draws too, and then takes the draw back by its
    offset. A generator of a GPU has one; torch's for a CPU raises an error, of which the engine would die.
    """

    def __new__(cls, state: Any, begun: int) -> Self:
        """Makes a generator on the CPU, whatever torch's default device is."""
        made: Self = super().__new__(cls, device="cpu")
        return made

    def __init__(self, state: Any, begun: int) -> None:
        self._state, self._begun = state, begun
        self.set_offset(0)

    def get_offset(self) -> int:
        """An arbitrary number, as vLLM only subtracts from it."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Goes to where the draw of the response's next token begins."""
        self.manual_seed(self._state.sampling_params.seed)
        torch.randint(0, 2**31, (self._begun + len(self._state.output_token_ids),), generator=self, dtype=torch.long)
