"""The weight push."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from quartet.config.base import Config, Count, Seconds


class WeightsConfig(Config):
    """The push of new weights to the rollout replicas."""

    backend: Literal["auto", "nccl", "gloo", "ipc", "cuda-ipc"] = "auto"
    """Transport of weights. ipc: shared host memory, if the learner and all replicas are on one machine; nccl: from
    GPU to GPU, if each member has its own GPU; gloo: from host to host, anywhere. auto takes the first of these that
    is possible. cuda-ipc: memory of the GPU, if the learner and all replicas share one; it takes room for one more
    copy of the weights there, so auto does not choose it."""
    bucket_mib: Count = 64
    """Size, in MiB, of the packed buckets in which weights are sent."""
    in_flight: Literal["keep", "keep-cache", "wait", "abort", "finish"] = "keep"
    """Treatment of requests in the engine during a push. keep: they pause and resume under the new weights with the
    KV cache recomputed; keep-cache: with the KV cache that they have, which requests that come later do not share;
    wait: they finish first, within timeout_s, or the push fails; abort: they end, and go on from their tokens at any
    replica; finish: they finish with the adapters that they began with, beside later ones with the new, which needs
    `adapters`. docs/weights.md says when to choose which."""
    stage: Literal["host", "gpu"] = "host"
    """Memory in which a push by NCCL keeps the learner's copy of the weights, and those that replicas have received
    until the commit. host: pinned host memory, with room for all weights once for each replica. gpu: the GPUs' own,
    which saves all copies to the host and back; it takes one more copy of the weights on the GPU of each sender, and
    on those of each replica together, which `quartet check` counts. Several workers of a replica stage a first push
    in host memory all the same."""
    senders: Count = 1
    """Number of learner ranks that send at the same time, each a share of the buckets; at most policy.ranks."""
    timeout_s: Seconds = 60
    """Deadline, in seconds, of a whole transfer."""
    commit_s: Seconds = 30
    """Deadline, in seconds, of swapping the weights in, which is a copy within one machine."""
    stall_s: Seconds = 10
    """Longest wait, in seconds, for one bucket to move or a group to form; then a member counts as stuck."""
    control_s: Seconds = 3
    """Longest wait, in seconds, for answers that need no work; slower replicas are left out of the push."""
    patience_s: Seconds = 300
    """Longest wait, in seconds, for a first replica, for instance while Serve replaces the only one."""
    prove_every: NonNegativeInt = 40
    """Pushes between two proofs, in which each replica scores a few fixed sequences and the push fails unless the
    learner gives the same log-probs. The first two pushes, a push after a change of members and a new replica are
    always proved. 0: only these."""
    prove_tolerance: PositiveFloat | None = None
    """Largest mean difference of these log-probs, as a part of their standard deviation, or of 1 nat if that is more.
    Null: five times what the first proof measures, when both sides begin with the same weights; from 0.0001 to 0.001
    in float32, and from 0.05 to 0.25 in bfloat16."""
    attempts: Count = 5
    """Tries of a push; if all fail the run ends with an error."""
    adapters: bool = False
    """Push the adapters of `policy.lora` alone, a few MB, with which the engines compute beside the model's own
    weights: nothing is rounded by a merge, and a push takes milliseconds, but each token of a response takes longer.
    The rollout service has them in `adapters`."""
    host: Annotated[str, Field(min_length=1)] | None = "127.0.0.1"
    """Address at which the rollout replicas reach the learner. Gloo and the rendezvous store listen there, and a
    replica's gloo on the address of its own machine on the way to it. Null, for replicas on other nodes: the address
    that Ray has for the node of each sending rank."""
