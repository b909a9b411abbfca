"""The policy learner: log-probs, one PPO batch's worth of training, and the sending of its weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from orchestrator.config import PPOConfig
from orchestrator.ppo import importance_weights, kl_estimate, policy_loss
from services.common.adapters import add_adapters
from services.common.arrays import Floats, Ints
from services.common.learner import Learner
from services.common.learner_config import PolicyConfig
from services.common.minibatches import Means, minibatches
from services.common.models import load_causal, load_tokenizer, response_logits
from services.common.numerics import entropy_of, logprobs_of, masked_sum
from services.common.ranks import Ranks
from services.common.sequences import PairTensors
from services.common.shards import Part
from services.common.weight_transfer.manifest import Manifest
from services.common.weight_transfer.sender import Sender, make_sender


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """One PPO batch of B responses, as the policy trains on it; every field B arrays."""

    prompts: Sequence[Ints]
    """[P]"""
    responses: Sequence[Ints]
    """[T]"""
    logprobs: Sequence[Floats]
    """[T] as sampled, by the rollout engine"""
    old_logprobs: Sequence[Floats]
    """[T] by this learner, before the update"""
    ref_logprobs: Sequence[Floats]
    """[T] by the frozen reference"""
    advantages: Sequence[Floats]
    """[T]"""
    kl_coef: float
    """Coefficient of the KL penalty in this batch's loss; used when ppo.kl.placement is loss."""


@dataclass(frozen=True, slots=True)
class _Micro:
    pairs: PairTensors
    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor
    advantages: torch.Tensor
    tokens: int
    kl_coef: float


class PolicyTrainer:
    """A language model under DeepSpeed, or one rank's share of it.

    Calls must not overlap. All ranks get the same calls in the same order, but for those that say otherwise.
    """

    def __init__(self, config: PolicyConfig, ppo: PPOConfig, temperature: float, ranks: Ranks | None = None) -> None:
        self._config = config
        self._ppo = ppo
        self._temperature = temperature
        model = load_causal(config.model, config.dtype, config.attn_implementation, packing=config.packing)
        self._learner = Learner(add_adapters(model, config.lora), config, ranks)
        self._sender: Sender | None = None
        self._manifest: Manifest | None = None
        self._moved = False

    @torch.no_grad()
    def logprobs(self, prompts: Sequence[Ints], responses: Sequence[Ints]) -> list[Floats]:
        """For each pair [T]: log pi(y_t | prefix) under the current weights, at the sampling temperature."""
        found: dict[int, Floats] = {}
        self._learner.module.eval()
        for part in self._learner.parts(prompts, responses):
            rows = part.rows
            pairs = self._learner.tensors([prompts[i] for i in rows], [responses[i] for i in rows])
            logits = response_logits(self._learner.model, pairs)
            if part.counts:
                logprobs = logprobs_of(logits, pairs.response_ids, self._temperature)
                found |= dict(zip(rows, pairs.unpad(logprobs), strict=True))
        return self._learner.shared(found, [len(response) for response in responses])

    def train(self, batch: PolicyBatch, seed: int) -> dict[str, float]:
        """Trains on one batch and returns the means over its optimizer steps."""
        means = Means()
        self._moved = True
        order = minibatches(len(batch.prompts), epochs=self._ppo.epochs, size=self._ppo.minibatch_size, seed=seed)
        for chosen in order:
            means.add(self._learner.step(self._micro_batches(batch, chosen), self._loss))
        return means.result()

    def _micro_batches(self, batch: PolicyBatch, chosen: Sequence[int]) -> list[_Micro]:
        prompts, responses = [batch.prompts[i] for i in chosen], [batch.responses[i] for i in chosen]
        tokens = sum(len(response) for response in responses)
        return [self._micro(batch, chosen, part, tokens) for part in self._learner.parts(prompts, responses)]

    def _micro(self, batch: PolicyBatch, chosen: Sequence[int], part: Part, tokens: int) -> _Micro:
        rows = [chosen[i] for i in part.rows]
        pairs = self._learner.tensors([batch.prompts[i] for i in rows], [batch.responses[i] for i in rows])

        def spread(values: Sequence[Floats]) -> torch.Tensor:
            return pairs.spread([values[i] for i in rows])

        return _Micro(
            pairs=pairs if part.counts else pairs.muted(),
            logprobs=spread(batch.logprobs),
            old_logprobs=spread(batch.old_logprobs),
            ref_logprobs=spread(batch.ref_logprobs),
            advantages=spread(batch.advantages),
            tokens=tokens,
            kl_coef=batch.kl_coef,
        )

    def _loss(self, micro: _Micro) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """PPO's loss of one micro-batch, every term a sum over tokens divided by the minibatch's token count."""
        ppo, mask = self._ppo, micro.pairs.action_mask
        logits = response_logits(self._learner.model, micro.pairs)
        new_logprobs = logprobs_of(logits, micro.pairs.response_ids, self._temperature)
        weights = importance_weights(micro.old_logprobs, micro.logprobs, mask, cap=ppo.importance_cap)
        result = policy_loss(
            new_logprobs,
            micro.old_logprobs,
            micro.advantages,
            mask,
            clip_eps_low=ppo.clip_eps_low,
            clip_eps_high=ppo.clip_eps_high,
            dual_clip=ppo.dual_clip,
            weights=weights,
            denominator=micro.tokens,
        )
        loss = result.loss
        with torch.set_grad_enabled(ppo.entropy_coef > 0):
            entropy = masked_sum(entropy_of(logits, self._temperature), mask) / micro.tokens
        if ppo.entropy_coef > 0:
            loss = loss - ppo.entropy_coef * entropy
        if ppo.kl.placement == "loss" and micro.kl_coef > 0:
            kl = kl_estimate(new_logprobs, micro.ref_logprobs, ppo.kl.estimator, mask)
            loss = loss + micro.kl_coef * masked_sum(kl, mask) / micro.tokens
        return loss, result._asdict() | {"loss": loss, "entropy": entropy}

    def rendezvous(self, backend: str, *, host: str, bucket_bytes: int, stall_s: float, senders: int = 1) -> int:
        """On the sending ranks, 0 to senders - 1: readies the sending end on first use; the port at which the next
        group meets."""
        if self._sender is None:
            self._manifest = Manifest.of(self._learner.shapes(), bucket_bytes)
            self._sender = make_sender(
                backend,
                self._manifest,
                host=host,
                stall_s=stall_s,
                sender=self._learner.ranks.rank,
                senders=senders,
            )
        return self._sender.rendezvous()

    def join(self, epoch: int, world_size: int) -> bytes:
        """On the sending ranks: forms the push group together with the replicas; the packed manifest."""
        sender, manifest = self._ready()
        sender.join(epoch, world_size)
        return manifest.pack()

    def gather(self, push: int) -> None:
        """On all ranks: brings the weights of this push to the sending ranks. Those send without the others: a push
        that fails leaves no rank waiting."""
        if self._sender is not None:
            self._sender.load(self._learner.full_weights(), push)
        else:
            for _ in self._learner.full_weights():
                pass
        self._moved = False

    def send(self, push: int) -> dict[int, bytes]:
        """On the sending ranks: sends what `gather` brings, or brought; the digests of the buckets sent. May overlap
        it."""
        sender, _ = self._ready()
        return sender.send(push)

    def admit(self, epoch: int, world_size: int) -> None:
        """On the sending ranks: sends what was sent last to a group of newcomers. May overlap any other call.

        Raises:
            RuntimeError: there is no copy of what was sent, and training has moved the weights on.
        """
        sender, _ = self._ready()
        if self._moved and not sender.keeps_copy:
            raise RuntimeError("the weights have moved on since the last push; the next one takes newcomers along")
        sender.admit(epoch, world_size)

    def leave(self) -> None:
        """On the sending ranks: ends the sending end; memory that it shares is given back."""
        if self._sender is not None:
            self._sender.close()

    def _ready(self) -> tuple[Sender, Manifest]:
        if self._sender is None or self._manifest is None:
            raise RuntimeError("rendezvous comes before join and send")
        return self._sender, self._manifest

    def save(self, folder: str) -> str:
        """Writes the model, its tokenizer and generation settings in Hugging Face's format; the absolute path."""
        return str(self._learner.save(folder, self._write))

    def take_snapshot(self, folder: str, step: int, copies: bool = True) -> None:
        """Copies the state after `step`, and the model itself, for `write_snapshot`. See Learner.take_snapshot."""
        self._learner.take_snapshot(Path(folder), step, self._write, copies=copies)

    def write_snapshot(self) -> None:
        """Brings it to disk; may run beside any other call."""
        self._learner.write_snapshot()

    def restore(self, folder: str) -> int:
        """Goes on from a snapshot, before any training; its step. See Learner.restore."""
        return self._learner.restore(Path(folder))

    def _write(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        self._learner.module.save_pretrained(folder, state_dict=weights)  # type: ignore[operator]
        load_tokenizer(self._config.model).save_pretrained(folder)
