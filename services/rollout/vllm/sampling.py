"""Changes to vLLM's sampling: ids that the tokenizer does not know, and seeds of responses that go on or whose
prompts are read in pieces."""

from typing import Any, Self

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as GpuLogitsProcessor

from quartet.models.loading import load_tokenizer
from quartet.seams.vllm import replace_requests
from quartet.wire.identity import vocabulary_size
from services.rollout.sample import seed_of_turn

BEGUN_KEY = "begun"
"""Name in SamplingParams.extra_args: number of tokens that a response had before its request."""


class TokenizerVocabulary(LogitsProcessor, GpuLogitsProcessor):
    """Gives the padding entries of a model's vocabulary probability 0; published models have some (Qwen 2.5: 271).

    vLLM has two model runners, V1 on a CPU and V2 on a GPU, and each refuses a processor that is not of its own
    class. This one is of both, since vLLM decides which of them runs only when it has the arguments of the engine.
    """

    def __init__(self, vllm_config: Any, *_of_runner: Any) -> None:
        """Reads the size of the vocabulary.

        Args:
            vllm_config: the engine's configuration.
            _of_runner: the device and whether memory is pinned, from V1; the requests' state, from V2.
        """
        self._size = vocabulary_size(load_tokenizer(vllm_config.model_config.tokenizer))

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """Changes the logits [requests, V] in place. V2 also tells of the rows in `ctx`, which change all alike."""
        logits[:, self._size :] = -torch.inf
        return logits

    def is_argmax_invariant(self) -> bool:
        """False: the largest logit may belong to a padding entry. V1 asks for it."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Does nothing, since the processor keeps no state. V1 calls it before each step."""


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
    replace_requests(runner, RunnerRequests)


def continued(state: Any, begun: int) -> torch.Generator:
    """A new request's generator, for a response that had `begun` tokens before.

    On a GPU, where a draw is of no fixed size, it gets another seed, which follows from its own and `begun`.
    Otherwise a token would be drawn as the first one was.
    """
    generator: torch.Generator = state.generator
    if generator.device.type == "cpu":
        return CpuGenerator(state, begun)
    if begun:
        generator.manual_seed(seed_of_turn(generator.initial_seed(), begun))
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
