"""The `orchestrator:` section of the YAML file, each key documented where it is defined."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from services.common.config import LAST_PORT, Config, Seconds, matching
from services.common.learner_config import PolicyConfig

Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


def _port_in_range(target: str) -> str:
    if not 1 <= int(target.rpartition(":")[2]) <= LAST_PORT:
        raise ValueError(f"should end in a port from 1 to {LAST_PORT}")
    return target


class DataConfig(Config):
    """Where prompts come from."""

    path: str
    """A .jsonl or .parquet file, a folder of such files named after splits (train.jsonl, eval.jsonl), or a
    Hugging Face data set saved with `save_to_disk`."""
    input_key: str = "prompt"
    """Column that holds the prompt: text, or a list of chat messages when `chat_template` is on."""
    label_key: str | None = None
    """Column whose value travels to function scorers as the pair's label."""
    prompt_split: str = "train"
    """What to train on: a split's name, with an optional range of its rows or of a fraction of them:
    `train`, `train[:1000]`, `train[500:]`, `train[:90%]`."""
    eval_split: str = "eval"
    """What to evaluate on, in the same form. Must share no row with prompt_split."""
    split_seed: Annotated[int, Field(ge=0)] | None = None
    """Shuffles the rows of a split with this seed before its range is taken. Null keeps the file's order."""
    chat_template: bool = False
    """Apply the tokenizer's chat template to the prompt."""
    max_prompt_length: Count = 1024
    """Prompts of more tokens than this are left out, and their number is reported."""


class SamplingConfig(Config):
    """How responses are sampled."""

    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Divides the logits, in the rollout engine, the reference and the learner alike. At least 0.01: vLLM samples
    at that where it is asked for less, and its log-probs would no longer be the learner's."""
    max_new_tokens: Count = 256
    """Longest response, in tokens."""
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    """No end-of-sequence token before this many tokens."""
    seeded: bool = True
    """Give each request a seed of its own, derived from `seed`, the step and the row."""

    @model_validator(mode="after")
    def _least_fits(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens ({self.min_new_tokens}) must not exceed max_new_tokens ({self.max_new_tokens})"
            )
        return self


class KLConfig(Config):
    """The penalty that keeps the policy near the reference."""

    coef: Annotated[float, Field(ge=0)] = 0.1
    """Its coefficient; the initial one when `target` is set. 0 turns the penalty off."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Schulman's estimator of KL(policy || reference) from samples of the policy."""
    placement: Literal["reward", "loss"] = "reward"
    """Subtract it from each token's reward, or add it to the policy's loss (where k2 or k3 is the sound choice:
    the expected gradient of k1 is zero)."""
    target: Annotated[float, Field(gt=0)] | None = None
    """Adapt the coefficient towards this KL per response, in nats (Ziegler et al. 2019). Null keeps it fixed."""
    horizon: Annotated[float, Field(gt=0)] = 10_000
    """Samples over which the adaptive coefficient reacts."""

    @model_validator(mode="after")
    def _k1_has_no_gradient(self) -> Self:
        if self.placement == "loss" and self.estimator == "k1" and self.coef > 0:
            raise ValueError("estimator k1 in the loss has an expected gradient of zero; choose k2 or k3")
        return self

    @model_validator(mode="after")
    def _zero_stays_zero(self) -> Self:
        if self.target is not None and self.coef == 0:
            raise ValueError("target adapts the coefficient by factors, so coef must be more than 0")
        return self


class PPOConfig(Config):
    """The algorithm."""

    gamma: Fraction = 1.0
    """Discount per token."""
    gae_lambda: Fraction = 0.95
    """Bias against variance in generalised advantage estimation."""
    kl: KLConfig = KLConfig()
    """The KL penalty."""
    score_clip: Annotated[float, Field(gt=0)] | None = 10.0
    """Scores are clipped to plus or minus this, after normalisation. Null turns it off."""
    normalise_scores: bool = False
    """Subtract the running mean of the scores and divide by their running standard deviation."""
    whiten_advantages: bool = True
    """Zero mean and unit variance over all response tokens of the batch."""
    clip_eps_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """How far the ratio may fall below 1 before its gradient stops."""
    clip_eps_high: Annotated[float, Field(gt=0)] = 0.2
    """How far the ratio may rise above 1 before its gradient stops."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound on the ratio for negative advantages (Ye et al. 2020). Null turns it off; 3 is usual."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus. 0 turns it off; entropy is measured all the same."""
    epochs: Count = 2
    """Passes over each batch, for policy and critic."""
    minibatch_size: Count = 32
    """Samples per optimizer step, for policy and critic."""
    importance_cap: Annotated[float, Field(ge=1)] | None = 2.0
    """Cap of the truncated importance weights between the rollout engine's log-probs and the learner's.
    Null turns the correction off; the mismatch is measured all the same."""


class WeightsConfig(Config):
    """The push of new weights to the rollout replicas."""

    backend: Literal["auto", "nccl", "gloo", "ipc"] = "auto"
    """nccl on NVIDIA GPUs, gloo elsewhere, ipc (shared host memory) where the learner and all replicas are on one
    machine; auto takes what the rollout replicas were started with."""
    bucket_mib: Annotated[int, Field(ge=1)] = 64
    """Weights travel in packed buckets of this size, in MiB."""
    in_flight: Literal["keep", "wait", "abort"] = "keep"
    """What happens to requests in the engine during a push: keep pauses them and resumes under the new weights
    with the KV cache recomputed, wait lets them finish first, abort ends them."""
    streaming: bool = False
    """Load each bucket into place as it comes, instead of staging all of them beside the serving weights. Saves one
    copy of the weights in each replica's host memory; a push that breaks off then leaves replicas that serve nobody
    until a repeated push succeeds, or Serve replaces them."""
    senders: Count = 1
    """Learner ranks that send at the same time, each its share of the buckets; at most policy.ranks, and 1 with
    nccl."""
    timeout_s: Seconds = 60
    """Deadline of a whole transfer."""
    commit_s: Seconds = 30
    """Deadline of swapping the weights in: of copying them, within one machine."""
    stall_s: Seconds = 10
    """Longest wait for one bucket to move and for a group to form; then a member is taken for stuck."""
    control_s: Seconds = 5
    """Longest wait for an answer to what needs no work; a replica that is slower is left out of the push."""
    patience_s: Seconds = 300
    """Longest wait for a first replica when there is none, for instance while Serve replaces the only one."""
    attempts: Count = 5
    """Tries before a push that fails ends the run with an error."""
    host: str = "127.0.0.1"
    """Address of the learner as the rollout replicas reach it; the rendezvous store listens there."""


class TimeoutsConfig(Config):
    """Deadlines of the calls, in seconds. A call that is out of time fails with an error that names it."""

    generate_s: Seconds = 300
    """One Generate call, all its prompts."""
    stall_s: Annotated[float, Field(ge=5)] = 20
    """Silence after which a rollout replica is given up as stuck and its unfinished samples are asked of another.
    Replicas speak every 2 s, busy or not."""
    score_s: Seconds = 60
    """One Score, Logprobs or Values call."""
    train_s: Seconds = 600
    """One optimizer phase of policy or critic."""
    info_s: Seconds = 30
    """Info calls; the first connection is waited for a few seconds only."""
    start_s: Seconds = 300
    """Starting the policy learner; and, when a run goes back to a checkpoint, waiting for the services."""


class EvaluationConfig(Config):
    """Evaluation on held-out prompts while training runs."""

    every: Annotated[int, Field(ge=0)] = 10
    """Evaluate before the first step, after every so many steps and after the last. 0: never."""
    max_prompts: Count | None = None
    """Use the first so many prompts of eval_split. Null: all."""
    samples_per_prompt: Count = 1
    """Responses to each prompt, sampled at the training temperature."""
    judges: dict[str, str] = Field(default_factory=dict)
    """Functions that score the evaluation's samples beside the reward service, by name: an import path such as
    `recipes.reviews.gold:score`. They are never trained on."""

    @field_validator("judges")
    @classmethod
    def _names_are_free(cls, judges: dict[str, str]) -> dict[str, str]:
        if taken := {"score", "kl", "length", "truncated"} & judges.keys():
            raise ValueError(
                f"{', '.join(sorted(taken))}: measured by every evaluation; call the judge something else"
            )
        return judges


class CheckpointConfig(Config):
    """Checkpoints, and what a run does when a learner is lost."""

    every: Annotated[int, Field(ge=0)] = 10
    """Take one before the first step and after every so many. 0: never; then nothing can be resumed, and a learner
    that dies ends the run."""
    keep: Count = 2
    """How many are kept, the newest."""
    folder: str | None = None
    """Where. With learners on several nodes it must be on a disk that all of them share. Null:
    runs/<name>/checkpoints."""
    background: bool = True
    """Write while training goes on, from copies that each learner's ranks keep in host memory. False: training waits
    until all is written, and no memory is taken."""
    journal: bool = True
    """Keep on disk what each step since the last checkpoint was trained on, so that going back to it samples nothing
    again and ends with the same weights."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """How often the run goes back to its last checkpoint by itself because a rank of the policy or the critic was
    lost, or a service did not answer in time, until there is a newer one; then the loss ends it. 0: at the first."""
    timeout_s: Seconds = 1800
    """Longest that taking, writing or restoring one may take."""


class LogConfig(Config):
    """Where measurements go besides runs/<name>/metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files to runs/<name>/tensorboard."""
    wandb_project: str | None = None
    """Log to this Weights & Biases project (install the extra `wandb`). Null: off."""


class OrchestratorConfig(Config):
    """The `orchestrator:` section: one PPO run."""

    name: Annotated[str, matching(r"[A-Za-z0-9][\w.-]*", "letters, digits, `_`, `-`, `.`, a letter or digit first")]
    """The run's name: results go to runs/<name>. Letters, digits, `_`, `-` and `.`."""
    target: Annotated[str, matching(r"\S+:\d{1,5}", "host:port"), AfterValidator(_port_in_range)] = "127.0.0.1:19000"
    """host:port of Serve's gRPC proxy, the same for all four services."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of the prompt order, the sampling seeds and the minibatch order."""
    steps: Count = 100
    """PPO steps: one batch generated, one update of policy and critic, one weight push."""
    batch_size: Count = 128
    """Prompts per step, one response each."""
    prompts_per_call: Count = 64
    """Prompts in one Generate call; smaller spreads a batch over more replicas."""
    data: DataConfig
    """Prompts."""
    sampling: SamplingConfig = SamplingConfig()
    """Generation."""
    ppo: PPOConfig = PPOConfig()
    """The algorithm."""
    policy: PolicyConfig
    """The policy learner."""
    weights: WeightsConfig = WeightsConfig()
    """The weight push."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    """Deadlines."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation."""
    log: LogConfig = LogConfig()
    """Metrics."""
    save: str | None = None
    """Folder to which the trained policy is written at the end, in Hugging Face's format.
    Null: runs/<name>/policy."""

    @model_validator(mode="after")
    def _batches_divide(self) -> Self:
        if self.ppo.minibatch_size > self.batch_size:
            raise ValueError(
                f"ppo.minibatch_size ({self.ppo.minibatch_size}) must not exceed batch_size ({self.batch_size})"
            )
        return self

    @model_validator(mode="after")
    def _coefficient_stays_positive(self) -> Self:
        kl = self.ppo.kl
        # A step changes an adaptive coefficient by up to 0.2 * batch_size / horizon of itself (ppo.AdaptiveKL).
        if kl.target is not None and kl.horizon <= 0.2 * self.batch_size:
            raise ValueError(
                f"ppo.kl.horizon ({kl.horizon:g}) must be more than 0.2 * batch_size ({self.batch_size})"
            )
        return self

    @model_validator(mode="after")
    def _senders_are_ranks(self) -> Self:
        senders = self.weights.senders
        if senders > self.policy.ranks:
            raise ValueError(f"weights.senders ({senders}) must not exceed policy.ranks ({self.policy.ranks})")
        if self.weights.streaming and self.weights.backend == "ipc":
            raise ValueError("weights.streaming saves a copy that weights.backend ipc does not make; leave it out")
        if senders > 1 and self.weights.backend == "nccl":
            raise ValueError(f"weights.senders ({senders}) must be 1 with weights.backend nccl")
        return self
