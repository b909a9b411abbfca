"""vLLM's scheduler with responses handed over in few parts instead of token by token, and no request preempted.

The service sends whole samples. vLLM's engine, written for chat, sends every token and its log-prob to the serving
process in a separate message, which for small models takes a quarter of the engine's time. This scheduler holds the
messages back until the response is finished. Only every PARTS_S it sends what it holds of all responses, so that long
ones need not be begun again if this engine is lost. Where many responses are read along, it sends several tokens of
each at a time: a message through a replica and Serve costs as much processor time as several tokens of a small model.

vLLM starts a request when its tokens so far fit into the KV cache. When the running ones then grow beyond it, one of
them has to leave, and computes all of its tokens again later. This scheduler starts a request only if all of them fit
until they end (room.py), so that the number that runs follows the use of the cache. Else scheduling stays as it is.
"""

import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

from services.rollout.vllm.room import Need, startable

PARTS_S = 0.5
"""Seconds between two times at which parts of unfinished responses are sent."""
AT_ONCE_KEY = "at_once"
"""Name in SamplingParams.extra_args: True for a request none of whose outputs is held back."""
STREAMED_KEY = "streamed"
"""Name in SamplingParams.extra_args: True for a request whose caller reads along."""
MOST_MESSAGES = 500
"""Most outputs a second of all requests with STREAMED_KEY; first and last ones do not wait."""


class WholeResponseScheduler(AsyncScheduler):
    """Sends a request's outputs together: when it finishes, every PARTS_S, and when the engine is paused; those of
    requests with AT_ONCE_KEY as they come, those with STREAMED_KEY as MOST_MESSAGES allows. Preempts none.

    At a pause too, because the engine labels outputs with the version of the weights at the time of sending, and
    weights change only during a pause: tokens of the old weights have to be sent before.
    """

    max_num_active_reqs: int
    """Number of requests above which none starts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, _Held] = {}
        self._due: dict[str, float] = {}
        """Requests that are streamed -> the time from which on the next output is sent."""
        self._sent = time.monotonic()
        self._most: int = self.max_num_active_reqs
        groups = self.kv_cache_config.kv_cache_groups
        # Each group of layers has blocks of its own; one of them is no request's.
        self._blocks = (self.kv_cache_config.num_blocks - 1) // max(1, len(groups))
        longest = -(-self.max_model_len // self.block_size) + 1
        self._always_fit = self._most * longest <= self._blocks

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """The work of one step, in which only requests start that fit into the KV cache until they end."""
        if self.waiting and not self._always_fit:
            self.max_num_active_reqs = min(self._most, len(self.running) + self._startable())
        return super().schedule(*args, **kwargs)

    def _startable(self) -> int:
        queued = islice(self.waiting, self._most)
        return startable(map(self._need, self.running), map(self._need, queued), self._blocks, self.block_size)

    def _need(self, request: Request) -> Need:
        now = request.num_tokens
        return Need(now, min(request.num_prompt_tokens + request.max_tokens, self.max_model_len) - now)

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        """Client -> outputs of one step, without those of unfinished requests, which are held back."""
        messages: dict[int, EngineCoreOutputs] = super().update_from_output(*args, **kwargs)
        now = time.monotonic()
        for client, message in messages.items():
            message.outputs = [whole for output in message.outputs if (whole := self._hold(client, output, now))]
        if self.pause_state == PauseState.PAUSED_ALL or now - self._sent >= PARTS_S:
            self._sent = now
            for held in self._held.values():
                messages.setdefault(held.client, EngineCoreOutputs(outputs=[])).outputs.append(held.joined())
            self._held.clear()
        return {client: message for client, message in messages.items() if _says_something(message)}

    def has_requests(self) -> bool:
        """True if another step is needed. A pause is complete only when no output is held back."""
        return super().has_requests() or (self.pause_state == PauseState.PAUSED_ALL and bool(self._held))

    def finish_requests(self, request_ids: str | Iterable[str] | None, *args: Any, **kwargs: Any) -> list[Request]:
        """Ends cancelled or aborted requests, and drops their held outputs, which have no reader any more."""
        ended: list[Request] = super().finish_requests(request_ids, *args, **kwargs)
        for request in ended:
            self._held.pop(request.request_id, None)
            self._due.pop(request.request_id, None)
        return ended

    def _hold(self, client: int, output: EngineCoreOutput, now: float) -> EngineCoreOutput | None:
        name = output.request_id
        held = self._held.setdefault(name, _Held(client))
        held.parts.append(output)
        if not (output.finished or self._wanted(name, now)):
            return None
        if output.finished:
            self._due.pop(name, None)
        return self._held.pop(name).joined()

    def _wanted(self, name: str, now: float) -> bool:
        """True if the outputs of a request that goes on are sent now."""
        params = self.requests[name].sampling_params
        extra = (params and params.extra_args) or {}
        if not extra.get(STREAMED_KEY):
            return bool(extra.get(AT_ONCE_KEY))
        if now < self._due.setdefault(name, now):
            return False
        self._due[name] = now + len(self._due) / MOST_MESSAGES
        return True


class _Held:
    """Outputs of one request, in order."""

    __slots__ = ("client", "parts")

    def __init__(self, client: int) -> None:
        self.client = client
        self.parts: list[EngineCoreOutput] = []

    def joined(self) -> EngineCoreOutput:
        """The last output extended by the tokens of those before it."""
        whole = self.parts[-1]
        if len(self.parts) == 1:
            return whole
        lists = [part.new_logprobs for part in self.parts if part.new_logprobs is not None]
        whole.new_token_ids = [token for part in self.parts for token in part.new_token_ids]
        whole.prefill_stats = self.parts[0].prefill_stats
        if lists:
            # As many columns as the request of its step with the most log-probs; all have at least this request's.
            columns = min(part.logprobs.shape[1] for part in lists)
            whole.new_logprobs = LogprobsLists(
                np.concatenate([part.logprob_token_ids[:, :columns] for part in lists]),
                np.concatenate([part.logprobs[:, :columns] for part in lists]),
                np.concatenate([part.sampled_token_ranks for part in lists]),
            )
        return whole


def _says_something(message: EngineCoreOutputs) -> bool:
    return bool(message.outputs or message.finished_requests or message.scheduler_stats)
