"""A second rollout engine: transformers alone, one token at a time. `engine: examples.plain_engine:start` takes it.

It shows what an engine has to do, and nothing that makes one fast: each response is computed by itself, without a
cache of keys and values.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from quartet.models.device import default_device, gpu_uuid
from quartet.models.distribution import end_ids
from quartet.models.loading import load_causal, load_tokenizer
from quartet.weight_transfer.expected import ExpectedWeights
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.place import Place, machine
from quartet.weight_transfer.receiver import Joining, Receiver, make_receiver
from quartet.wire.codec import Floats, Ints
from quartet.wire.errors import InvalidArgument
from quartet.wire.identity import vocabulary_size
from services.rollout.config import RolloutConfig
from services.rollout.interface import NO_VERSION, Engine
from services.rollout.sample import FinishReason, Sample, Sampling

REMEMBERED = 8
"""Versions whose checksums are kept."""


async def start(config: RolloutConfig) -> Engine:
    """Loads the model."""
    return await asyncio.to_thread(PlainEngine, config)


class PlainEngine:
    """One model of transformers. Between two tokens of a response it may be paused and get new weights."""

    workers = 1

    def __init__(self, config: RolloutConfig) -> None:
        device = default_device()
        self.tokenizer = load_tokenizer(config.model)
        self._model = load_causal(config.model, config.dtype).to(device).eval()
        text = self._model.config.get_text_config()
        self.version, self.checksum = 0, ""
        self.checksums: dict[int, str] = {}
        self.backend: str = config.weight_backend
        self.place = Place(machine(), tuple(filter(None, [gpu_uuid(device)])))
        self.vocab_size = int(text.vocab_size)
        self.max_length = config.longest(int(text.max_position_embeddings))
        self.end_ids = end_ids(config.model, self.tokenizer)
        self._words = vocabulary_size(self.tokenizer)
        self._expected = ExpectedWeights(self._model, config.dtype)
        self.longest_manifest = self._expected.longest_manifest
        self._device, self._seeds = device, iter(range(config.seed, 1 << 62))
        self._running = 0
        self._turn = asyncio.Lock()
        """Held while the model computes, and while it is paused."""
        self._paused = False
        self._receiver: Receiver | None = None
        self._manifest: Manifest | None = None
        self._loading: asyncio.Task[None] | None = None
        """The last copying of received weights into the model, which no deadline of a commit can end."""
        self._whole = True
        """False from the begin of a commit to its end, and after one that failed."""

    async def generate(
        self,
        index: int,
        prompt_ids: Ints,
        sampling: Sampling,
        seed: int | None,
        begun: Ints | None = None,
        report: Callable[[Sample], None] = lambda part: None,
    ) -> Sample:
        """Samples one response. Each token's draw follows from seed and position, so that a response that was begun
        elsewhere goes on as it would have there."""
        if sampling.top_p < 1 or sampling.top_k:
            raise InvalidArgument("sampling.top_p, top_k: this engine samples from the whole distribution")
        drawn = next(self._seeds) if seed is None else seed
        self._running += 1
        try:
            return await self._respond(index, prompt_ids, sampling, drawn, begun)
        finally:
            self._running -= 1

    async def _respond(
        self, index: int, prompt_ids: Ints, sampling: Sampling, seed: int, begun: Ints | None
    ) -> Sample:
        before = [*prompt_ids.tolist(), *(begun.tolist() if begun is not None else [])]
        first = len(before) - len(prompt_ids)
        ids: list[int] = []
        logprobs: list[float] = []
        spans: list[tuple[int, int, int]] = []
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.end_ids)}
        reason = FinishReason.LENGTH
        while first + len(ids) < sampling.max_new_tokens and len(before) + len(ids) < self.max_length:
            step = first + len(ids)
            barred = ends if step < sampling.min_new_tokens else set()
            async with self._turn:
                token, logprob = await asyncio.to_thread(self._draw, before + ids, sampling, barred, (seed, step))
                version = self.version
            ids.append(token)
            logprobs.append(logprob)
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1], len(ids))
            else:
                spans.append((version, len(ids) - 1, len(ids)))
            if token in ends:
                reason = FinishReason.STOP
                break
        return Sample(index, np.asarray(ids, np.int32), np.asarray(logprobs, np.float32), reason, tuple(spans))

    @torch.inference_mode()
    def _draw(
        self, ids: Sequence[int], sampling: Sampling, barred: set[int], draw: tuple[int, int]
    ) -> tuple[int, float]:
        """The next token and its log-prob, at the sampling temperature."""
        logits = self._model(torch.tensor([ids], device=self._device)).logits[0, -1].float()
        logits[self._words :] = -torch.inf  # padding of the vocabulary, which is no token of the tokenizer
        logits[list(barred)] = -torch.inf
        if sampling.temperature == 0:
            return int(logits.argmax()), 0.0
        distribution = torch.log_softmax(logits / sampling.temperature, 0)
        uniform = np.random.default_rng(draw).random()
        token = int(torch.searchsorted(distribution.exp().cumsum(0).cpu(), uniform).clamp(max=len(logits) - 1))
        return token, float(distribution[token])

    async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Log-probs of all tokens but the first, [T - 1] each."""
        async with self._turn:
            return [await asyncio.to_thread(self._scored, sequence) for sequence in sequences]

    @torch.inference_mode()
    def _scored(self, sequence: Ints) -> Floats:
        ids = torch.from_numpy(sequence.astype(np.int64)).to(self._device)
        logprobs = torch.log_softmax(self._model(ids[None]).logits[0, :-1].float(), -1)
        found: Floats = logprobs.gather(1, ids[1:, None])[:, 0].cpu().numpy()
        return found

    async def answer(self) -> None:
        """Answers at once, as the model is in this process."""

    async def check_health(self) -> None:
        """Finds nothing wrong: the model ends with this process."""

    def running(self) -> int:
        """Number of unfinished responses."""
        return self._running

    def check(self, manifest: Manifest) -> None:
        """Raises InvalidArgument unless the manifest holds exactly the model's weights."""
        self._expected.check(manifest)

    async def join(self, init_info: dict[str, Any]) -> None:
        """Joins a push group."""
        await self.leave()
        self._receiver = make_receiver(init_info["backend"], self._device)
        joining = Joining(**{name: init_info[name] for name in Joining.__dataclass_fields__ if name in init_info})
        await asyncio.to_thread(self._receiver.join, joining)

    async def leave(self) -> None:
        """Leaves the push group."""
        if self._receiver is not None:
            await asyncio.to_thread(self._receiver.close)

    async def rest(self) -> None:
        """Stops between two tokens."""
        if not self._paused:
            await self._turn.acquire()
            self._paused = True

    async def pause(self, in_flight: str) -> None:
        """Stops between two tokens, whatever `in_flight` says: without a cache, nothing of old weights is left."""
        await self.rest()

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._turn.release()

    async def receive(self, manifest: Manifest) -> str:
        """Receives the weights beside the model's."""
        assert self._receiver is not None
        self._manifest = manifest
        self._received = await asyncio.to_thread(self._receiver.receive, manifest)
        return self._received

    async def stale(self) -> list[str]:
        """Names none: a push that lacks weights is refused by `check`."""
        return []

    async def commit(self, version: int) -> None:
        """Copies the received weights into the model and goes on."""
        self._whole = False
        self._loading = asyncio.create_task(asyncio.to_thread(self._load))
        await asyncio.shield(self._loading)
        self.version, self.checksum, self._whole = version, self._received, True
        self.checksums.pop(version, None)
        self.checksums[version] = self._received
        self.checksums = dict(list(self.checksums.items())[-REMEMBERED:])
        self._resume()

    @torch.inference_mode()
    def _load(self) -> None:
        assert self._receiver is not None
        assert self._manifest is not None
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for bucket, data in self._receiver.buckets():
            for name, tensor in self._manifest.cut(bucket, data):
                parameters[name].copy_(tensor.to(self._device))
        self._receiver.check()

    async def abort(self) -> bool:
        """Goes on with the weights that the model has, which a push changes only in its commit. After a commit that
        failed these may be of two versions: False, and the engine stays paused until the next one."""
        if self._loading is not None:
            await asyncio.wait([self._loading])
        await self.leave()
        if self._whole:
            self._resume()
        else:
            self.version, self.checksum = NO_VERSION, ""
        return self._whole

    def shutdown(self) -> None:
        """Leaves the group; the model ends with this process."""
        if self._receiver is not None:
            self._receiver.close()
