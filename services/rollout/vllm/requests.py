"""Requests to vLLM's engine: for responses, begun here or elsewhere, and for scores."""

import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from quartet.seams.vllm import spans_so_far
from quartet.wire.codec import Floats, Ints
from quartet.wire.errors import Unavailable
from services.rollout.sample import FinishReason, Sample, Sampling, VersionSpans, cut, following
from services.rollout.vllm.sampling import BEGUN_KEY

FINISHED = frozenset(FinishReason)
"""Reasons of vLLM for which a response is finished; it ends requests for others too."""


class Requests:
    """The requests of one engine."""

    def __init__(self, llm: AsyncLLM, adapters: LoRARequest | None = None) -> None:
        """`adapters` names those with which all requests are computed."""
        self._llm = llm
        self._adapters = adapters
        self._numbers = itertools.count()
        self._responding: set[str] = set()
        self.pauses = 0
        """Number of pauses for a push: between two of them all requests come under the same weights. Versions
        would not do, since a run that goes back to a checkpoint uses their numbers again."""

    async def generate(
        self,
        index: int,
        prompt_ids: Ints,
        sampling: Sampling,
        seed: int | None,
        begun: Ints | None = None,
        report: Callable[[Sample], None] = lambda part: None,
    ) -> Sample:
        """Samples one response, or the rest of it. Arguments as of Engine.generate. Cancelling aborts the engine's
        request.

        Raises:
            Unavailable: the engine died, or ended the request itself (a push with in_flight: abort); may be repeated.
        """
        given = begun if begun is not None else np.empty(0, np.int32)
        name = f"r{next(self._numbers)}"
        prompt = self._prompt(np.concatenate([prompt_ids, given]))
        response, made = None, Sample(index, np.empty(0, np.int32), np.empty(0, np.float32), None, ())
        self._responding.add(name)
        try:
            async with aclosing(self._asked(prompt, _params(sampling, len(given), seed), name)) as outputs:
                async for output in outputs:
                    response = output.outputs[0]
                    reported = len(made.response_ids)
                    if response.finish_reason not in FINISHED and len(response.token_ids) > reported:
                        spans = cut(self._spans(name, response), reported)
                        part = Sample(index, *_tokens(response, reported), None, spans)
                        made = following(made, part)
                        report(part)
        except EngineDeadError as error:
            raise Unavailable(f"the engine of this replica died: {error}") from None
        finally:
            self._responding.discard(name)
        if response is None or response.finish_reason not in FINISHED:
            raise Unavailable("the engine ended the request before it was finished; ask again")
        reported, reason = len(made.response_ids), FinishReason(response.finish_reason)
        spans = cut(_spans(response.weight_versions), reported)
        return following(made, Sample(index, *_tokens(response, reported), reason, spans))

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, salt: str = ""
    ) -> AsyncGenerator[tuple[Any, VersionSpans], None]:
        """vLLM's outputs of one response as they come, each with the spans of versions of all tokens so far. Closing
        it aborts the engine's request. Prompts share the KV cache only of those with the same `salt`.

        Raises:
            Unavailable: as `generate`.
        """
        name = f"h{next(self._numbers)}"
        prompt = tokens_input(list(prompt_ids), cache_salt=f"{self.pauses}{salt and '-'}{salt}")
        self._responding.add(name)
        try:
            async with aclosing(self._asked(prompt, params, name)) as outputs:
                async for output in outputs:
                    response = output.outputs[0]
                    if response.finish_reason is not None and response.finish_reason not in FINISHED:
                        raise Unavailable("the engine ended the request before it was finished; ask again")
                    yield output, self._spans(name, response)
        except EngineDeadError as error:
            raise Unavailable(f"the engine of this replica died: {error}") from None
        finally:
            self._responding.discard(name)

    def _spans(self, name: str, response: Any) -> VersionSpans:
        """The spans of a response that is not finished; has to be called as soon as its output has come."""
        if response.finish_reason is not None:
            return _spans(response.weight_versions)
        return _spans(spans_so_far(self._llm, name))

    async def end(self) -> None:
        """Ends all requests for responses, which report what they have. The engine is paused."""
        await self._llm.abort(list(self._responding))

    async def score(self, sequence: Ints) -> Floats:
        """Log-probs of all tokens but the first, over the whole vocabulary, [T - 1].

        Raises:
            Unavailable: the engine died, or ended the request.
        """
        # Generates one token, since an engine does not process a request for none.
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        final = None
        try:
            async for output in self._asked(self._prompt(sequence), params, f"p{next(self._numbers)}"):
                final = output.prompt_logprobs
        except EngineDeadError as error:
            raise Unavailable(f"the engine of this replica died: {error}") from None
        if final is None:
            raise Unavailable("the engine ended the request before it was finished; ask again")
        return np.asarray(final.logprobs, np.float32)

    def _asked(self, prompt: Any, params: SamplingParams, name: str) -> AsyncGenerator[Any, None]:
        outputs: AsyncGenerator[Any, None] = self._llm.generate(prompt, params, name, lora_request=self._adapters)
        return outputs

    def _prompt(self, ids: Ints) -> dict[str, Any]:
        """A prompt for the engine. It shares the KV cache only of prompts that came under the same weights."""
        return {"prompt_token_ids": ids.tolist(), "cache_salt": str(self.pauses)}


def _params(sampling: Sampling, begun: int, seed: int | None) -> SamplingParams:
    """Parameters of a response that has `begun` tokens already, all limits being those of the whole."""
    return SamplingParams(
        max_tokens=sampling.max_new_tokens - begun,
        min_tokens=max(sampling.min_new_tokens - begun, 0),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        seed=seed,
        logprobs=0,
        # A list of numbers; else vLLM makes a dictionary for each token.
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
        extra_args={BEGUN_KEY: begun} if begun else None,
    )


def _spans(noted: Any) -> VersionSpans:
    """Spans as vLLM notes them; None if no token has come."""
    return tuple((int(span.version), span.start, span.end) for span in noted or ())


def _tokens(response: Any, start: int) -> tuple[Ints, Floats]:
    """Ids and log-probs of the response's tokens from `start` on."""
    sampled = response.logprobs
    return np.asarray(sampled.token_ids[start:], np.int32), np.asarray(sampled.logprobs[start:], np.float32)
