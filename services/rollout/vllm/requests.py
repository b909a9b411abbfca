"""Requests to vLLM's engine: for responses, begun here or elsewhere, and for scores."""

import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from quartet.seams.vllm import adapters_at, spans_so_far, waits
from quartet.trajectory import VersionSpans
from quartet.wire.codec import Floats, Ints
from quartet.wire.errors import Unavailable
from services.rollout.sample import FinishReason, Sample, Sampling, cut, following
from services.rollout.vllm.sampling import BEGUN_KEY

FINISHED = frozenset(FinishReason)
"""Reasons of vLLM for which a response is finished; it ends requests for others too."""
WHOLE = "r"
"""Begins the names of requests for whole responses, which can begin again before their first token."""


@dataclass(frozen=True)
class Pushed:
    """Adapters of one version, in one of the workers' places."""

    version: int
    place: int


class Requests:
    """The requests of one engine."""

    def __init__(self, llm: AsyncLLM, adapters: int = 0) -> None:
        """`adapters` is the number of versions of a policy's adapters that the engine keeps. 0: all requests are
        computed with the model's own weights; 1: with the adapters of the last push; more: each to its end with
        those that were the newest when it began."""
        self._llm = llm
        self._adapters = adapters
        self._newest = Pushed(0, 0)
        self._places = [*range(1, adapters), 0]
        """The workers' places in the order of the pushes that brought something there, the newest last."""
        self._numbers = itertools.count()
        self._responding: dict[str, Pushed] = {}
        """Requests for responses -> the adapters that were the newest when they came."""
        self._again: set[str] = set()
        """Requests that a push ended before their first token, to be computed with its adapters."""
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
        ids, params = np.concatenate([prompt_ids, given]), _params(sampling, len(given), seed)
        while (sample := await self._sampled(index, ids, params, report)) is None:
            pass
        return sample

    async def _sampled(
        self, index: int, ids: Ints, params: SamplingParams, report: Callable[[Sample], None]
    ) -> Sample | None:
        """One response, or the rest of it; None if it has to begin again, under new weights."""
        name = f"{WHOLE}{next(self._numbers)}"
        made, finished = Sample(index, np.empty(0, np.int32), np.empty(0, np.float32), None, ()), None
        self._responding[name] = self._newest
        try:
            async with aclosing(self._asked(self._prompt(ids.tolist()), params, name)) as outputs:
                async for output in outputs:
                    response = output.outputs[0]
                    reported = len(made.response_ids)
                    reason = FinishReason(response.finish_reason) if response.finish_reason in FINISHED else None
                    if reason is None and len(response.token_ids) == reported:
                        continue
                    spans = cut(self._spans(name, response), reported)
                    part = Sample(index, *_tokens(response, reported), reason, spans)
                    made = following(made, part)
                    if reason is None:
                        report(part)
                    else:
                        finished = made
            again = name in self._again and not len(made.response_ids)
        except EngineDeadError as error:
            raise Unavailable(f"the engine of this replica died: {error}") from None
        finally:
            del self._responding[name]
            self._again.discard(name)
        if finished is None and not again:
            raise Unavailable("the engine ended the request before it was finished; ask again")
        return finished

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, salt: str = ""
    ) -> AsyncGenerator[tuple[Any, VersionSpans], None]:
        """vLLM's outputs of one response as they come, each with the spans of versions of all tokens so far. Closing
        it aborts the engine's request. Prompts share the KV cache only of those with the same `salt`.

        Raises:
            Unavailable: as `generate`.
        """
        name = f"h{next(self._numbers)}"
        prompt = self._prompt(list(prompt_ids), salt)
        self._responding[name] = self._newest
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
            del self._responding[name]

    def _spans(self, name: str, response: Any) -> VersionSpans:
        """The spans of a response so far; has to be called as soon as its output has come."""
        ended = response.finish_reason is not None
        noted = response.weight_versions if ended else spans_so_far(self._llm, name)
        spans = tuple((int(span.version), span.start, span.end) for span in noted or ())
        if spans and self._adapters > 1:  # vLLM notes the last push, whatever a request is computed with
            return ((self._responding[name].version, 0, spans[-1][2]),)
        return spans

    async def end(self) -> None:
        """Ends all requests for responses, which report what they have. The engine is paused."""
        await self._llm.abort(list(self._responding))

    async def make_place(self) -> int:
        """Chooses a place for the adapters of a push and returns it: one with adapters that no response needs any
        more, as after a push that was repeated, or that of the oldest, whose requests it ends. They report what they
        have. The engine is paused."""
        used = {pushed.place for pushed in self._responding.values()}
        place: int = min(self._places[:-1], key=used.__contains__)
        self._places.remove(place)
        self._places.insert(0, place)
        await self._llm.abort([name for name, pushed in self._responding.items() if pushed.place == place])
        return place

    async def serve(self, version: int) -> None:
        """Has later requests computed with what a push has brought, in the place that `make_place` chose if these are
        adapters, and those of which no token has come too. The engine is paused."""
        self._places.append(self._places.pop(0))
        self._newest = Pushed(version, self._places[-1])
        if self._adapters > 1:
            again = [name for name in self._responding if name[0] == WHOLE and waits(self._llm, name)]
            self._again.update(again)
            await self._llm.abort(again)  # in the order in which they came, as that is how they queue again

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
            async for output in self._asked(self._prompt(sequence.tolist()), params, f"p{next(self._numbers)}"):
                final = output.prompt_logprobs
        except EngineDeadError as error:
            raise Unavailable(f"the engine of this replica died: {error}") from None
        if final is None:
            raise Unavailable("the engine ended the request before it was finished; ask again")
        return np.asarray(final.logprobs, np.float32)

    def _asked(self, prompt: Any, params: SamplingParams, name: str) -> AsyncGenerator[Any, None]:
        adapters = adapters_at(self._newest.place) if self._adapters else None
        outputs: AsyncGenerator[Any, None] = self._llm.generate(prompt, params, name, lora_request=adapters)
        return outputs

    def _prompt(self, ids: list[int], salt: str = "") -> Any:
        """A prompt for the engine. It shares the KV cache only of prompts with the same `salt` that came under the
        same weights."""
        # Of vLLM's own kind, which its engine takes at once. One thread reads all others, and renders the messages of
        # everybody's chats before them.
        return tokens_input(ids, cache_salt=f"{self.pauses}{salt and '-'}{salt}")


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


def _tokens(response: Any, start: int) -> tuple[Ints, Floats]:
    """Ids and log-probs of the response's tokens from `start` on."""
    sampled = response.logprobs
    return np.asarray(sampled.token_ids[start:], np.int32), np.asarray(sampled.logprobs[start:], np.float32)
