"""vLLM's scheduler with responses handed over in few parts instead of token by token, and no request preempted.

The service sends whole samples. vLLM's engine, written for chat, sends every token and its log-prob to the serving
process in a separate message, which for small models takes a quarter of the engine's time. This scheduler holds the
messages back until the response is finished. Only every PARTS_S it sends what it holds of all responses, so that long
ones need not be begun again if this engine is lost. Where many responses are read along, it sends several tokens of
each at a time: a message through a replica and Serve costs as much processor time as several tokens of a small model.

vLLM starts a request when its tokens so far fit into the KV cache. When the running ones then grow beyond it, one of
them has to leave, and computes all of its tokens again later. This scheduler starts a request only if all of them fit
until they end (room.py), so that the number that runs follows the use of the cache. Else it decides as vLLM's does,
but asks less often for room in the cache (slots.py): with hundreds of responses a step is as long as its scheduling.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request

from services.rollout.vllm.room import Need, startable
from services.rollout.vllm.slots import blocks_fill_alike, skip_within_blocks

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
        self._held: defaultdict[str, list[EngineCoreOutput]] = defaultdict(list)
        """Requests -> outputs that are held back, in order."""
        self._read: dict[str, str] = {}
        """Requests that are read along -> AT_ONCE_KEY or STREAMED_KEY."""
        self._due: dict[str, float] = {}
        """Requests that are streamed -> the time from which on the next output is sent."""
        self._sent = time.monotonic()
        self._most: int = self.max_num_active_reqs
        groups = self.kv_cache_config.kv_cache_groups
        # Each group of layers has blocks of its own; one of them is no request's.
        self._blocks = (self.kv_cache_config.num_blocks - 1) // max(1, len(groups))
        longest = -(-self.max_model_len // self.block_size) + 1
        self._always_fit = self._most * longest <= self._blocks
        if blocks_fill_alike(self.kv_cache_config) and not self.num_lookahead_tokens:
            skip_within_blocks(self.kv_cache_manager, self.block_size)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """The work of one step, in which only requests start that fit into the KV cache until they end."""
        if self.waiting and len(self.running) < self._most and not self._always_fit:
            self.max_num_active_reqs = min(self._most, len(self.running) + self._startable())
        return super().schedule(*args, **kwargs)

    def _startable(self) -> int:
        queued = islice(self.waiting, self._most)
        return startable(map(self._need, self.running), map(self._need, queued), self._blocks, self.block_size)

    def _need(self, request: Request) -> Need:
        now = request.num_tokens
        return Need(now, min(request.num_prompt_tokens + request.max_tokens, self.max_model_len) - now)

    def add_request(self, request: Request) -> None:
        """Takes a request, and notes whether it is read along."""
        super().add_request(request)
        extra = (request.sampling_params and request.sampling_params.extra_args) or {}
        for key in (AT_ONCE_KEY, STREAMED_KEY):
            if extra.get(key):
                self._read[request.request_id] = key

    def update_from_output(self, scheduled: SchedulerOutput, made: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """Client -> outputs of one step, without those of unfinished requests, which are held back."""
        if made.logprobs is not None:
            made = replace(made, logprobs=StepLogprobs(made.logprobs))
        messages: dict[int, EngineCoreOutputs] = super().update_from_output(scheduled, made)
        now = time.monotonic()
        for message in messages.values():
            message.outputs = self._sent_now(message.outputs, now)
        if self.pause_state == PauseState.PAUSED_ALL or now - self._sent >= PARTS_S:
            self._sent = now
            for name, held in self._held.items():
                client = self.requests[name].client_index
                messages.setdefault(client, EngineCoreOutputs(outputs=[])).outputs.append(joined(held))
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
            self._forget_reader(request.request_id)
        return ended

    def _sent_now(self, outputs: Iterable[EngineCoreOutput], now: float) -> list[EngineCoreOutput]:
        """The outputs of a step that are sent, joined with those held of the same requests; the others are held."""
        held, read, sent = self._held, self._read, list[EngineCoreOutput]()
        for output in outputs:
            name = output.request_id
            held[name].append(output)
            if output.finish_reason is not None:
                self._forget_reader(name)
            elif name not in read or not self._wanted(name, now):
                continue
            sent.append(joined(held.pop(name)))
        return sent

    def _wanted(self, name: str, now: float) -> bool:
        """True if the outputs of a request that goes on and that is read along are sent now."""
        if self._read[name] == AT_ONCE_KEY:
            return True
        if now < self._due.setdefault(name, now):
            return False
        self._due[name] = now + len(self._due) / MOST_MESSAGES
        return True

    def _forget_reader(self, name: str) -> None:
        self._read.pop(name, None)
        self._due.pop(name, None)


class StepLogprobs:
    """Log-probs of all requests of a step, row by row in flat lists, which notes what a request has of them. To cut
    that out of vLLM's arrays, or to join arrays of a row, takes longer than all else that is done to hold it back."""

    __slots__ = ("_before", "ids", "logprobs", "ranks", "width")

    def __init__(self, lists: LogprobsLists) -> None:
        self.ids: list[int] = lists.logprob_token_ids.ravel().tolist()
        self.logprobs: list[float] = lists.logprobs.ravel().tolist()
        self.ranks: list[int] = lists.sampled_token_ranks.tolist()
        self.width = lists.logprobs.shape[1]
        self._before = lists.cu_num_generated_tokens

    def slice_request(self, row: int, count: int) -> "tuple[StepLogprobs, int, int]":
        """The step's log-probs, the first row of a request, and the number of its rows; vLLM's returns these rows."""
        return self, row if self._before is None else self._before[row], count


def joined(parts: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """The last of one request's outputs, extended by the tokens of those before it."""
    whole = parts[-1]
    noted: list[Any] = [part.new_logprobs for part in parts if part.new_logprobs is not None]
    whole.new_token_ids = [token for part in parts for token in part.new_token_ids]
    whole.prefill_stats = parts[0].prefill_stats
    whole.new_logprobs = _rows(noted) if any(count for _, _, count in noted) else None
    return whole


def _rows(noted: Sequence[tuple[StepLogprobs, int, int]]) -> LogprobsLists:
    """The rows that were noted. As many columns as the request of its step with the most log-probs; all have at
    least this request's."""
    columns = min(step.width for step, _, _ in noted)
    ids, logprobs, ranks = list[int](), list[float](), list[int]()
    for step, start, count in noted:
        for row in range(start, start + count):
            at = row * step.width
            ids += step.ids[at : at + columns]
            logprobs += step.logprobs[at : at + columns]
            ranks.append(step.ranks[row])
    shape = (len(ranks), columns)
    return LogprobsLists(
        np.array(ids, np.int32).reshape(shape),
        np.array(logprobs, np.float32).reshape(shape),
        np.array(ranks, np.int32),
    )


def _says_something(message: EngineCoreOutputs) -> bool:
    return bool(message.outputs or message.finished_requests or message.scheduler_stats)
