"""The `orchestrator:` section of the YAML file as a whole, with its deadlines and its log."""

import math
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, PositiveFloat

from orchestrator.algorithms.contract import Algorithm
from orchestrator.algorithms.registry import DEFAULT, AnyAlgorithm, kinds
from orchestrator.config.checkpoint import CheckpointConfig
from orchestrator.config.data import DataConfig, SamplingConfig
from orchestrator.config.evaluation import EvaluationConfig
from orchestrator.config.loop import LoopConfig
from orchestrator.config.services import ServiceConfig, ServicesConfig, Target
from orchestrator.config.unscored import UnscoredConfig
from orchestrator.config.weights import WeightsConfig
from orchestrator.environments.agent import RESULT
from orchestrator.environments.config import AgentConfig, EnvironmentConfig
from quartet.config.base import Config, Count, Seconds, Seed, matching
from quartet.config.learner import LoraConfig, PolicyConfig


class TimeoutsConfig(Config):
    """Deadlines of calls, in seconds. A call that exceeds its deadline fails with an error that names it."""

    generate_s: Seconds = 300
    """One Generate call with all its prompts, an evaluation's too, for each batch that may be under way: with
    `loop.depth` 2 a call may take three times as long, since those of three batches share the engines."""
    stall_s: Annotated[float, Field(ge=5)] = 8
    """Silence after which a rollout replica counts as stuck and its unfinished samples are requested from another.
    A working replica sends a message every 2 s."""
    score_s: Seconds = 60
    """One Score, Logprobs or Values call, its parts and repetitions included."""
    attempt_s: Seconds = 5
    """Silence after which a Score, Logprobs or Info call is also sent to another replica; the first answer counts. It
    grows if answers usually take more than a third of it, up to a third of the deadline."""
    take_s: Seconds | None = None
    """The loop's wait for a batch, whatever causes it. Null: the sum of start_s, twice score_s, and generate_s for
    each batch that may be under way, with an environment for each turn, and the time for its answers to all
    conversations under way, 64 at a time. Sampling, scoring and a push that keep their own deadlines need less."""
    train_s: Seconds = 600
    """One optimizer phase of policy or critic."""
    info_s: Seconds = 30
    """One Info call, at most. A start asks with shorter deadlines first and repeats what is not answered."""
    start_s: Seconds = 300
    """The start of the policy learner; and the wait for services that do not answer, when a run or an evaluation
    starts and when a run goes back to a checkpoint. Where nothing runs, a start ends after 3 s."""
    lease_s: Annotated[float, Field(ge=3, le=600)] = 30
    """Time for which the services count the run as alive after a renewal; the run renews three times within it. After
    that another run may claim the services; before, only by taking over."""

    @property
    def longest_update_s(self) -> float:
        """Longest time from a batch to the push: values, log-probs before and after the update, and the update."""
        return self.score_s + 3 * self.train_s


RunName = Annotated[str, matching(r"[A-Za-z0-9][\w.-]*", "letters, digits, `_`, `-`, `.`, a letter or digit first")]
"""Name of a run, and of its folder."""


class LogConfig(Config):
    """Destinations of metrics besides runs/<name>/metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files to runs/<name>/tensorboard."""
    wandb_project: str | None = None
    """Log to this Weights & Biases project (install it with `uv pip install -e '.[wandb]'`). Null: off."""


class OrchestratorConfig(Config):
    """The `orchestrator:` section: one PPO run."""

    name: RunName
    """The run's name: results go to runs/<name>. Letters, digits, `_`, `-` and `.`."""
    target: Target = "127.0.0.1:19000"
    """host:port of Serve's gRPC proxy, for all services without another target in `services`."""
    services: ServicesConfig = ServicesConfig()
    """Targets and application names of services that differ from the default."""
    seed: Seed = 0
    """Seed of the prompt order, the sampling and the minibatch order."""
    steps: Count = 100
    """PPO steps: one batch generated, one update of policy and critic, one weight push."""
    batch_size: Annotated[int, Field(ge=1, le=1 << 24)] = 128
    """Responses per step, algorithm.samples_per_prompt to each prompt. The orchestrator holds them all in memory."""
    prompts_per_call: Count = 64
    """Responses asked for in one Generate call; smaller spreads a batch over more replicas."""
    data: DataConfig
    """Prompts."""
    sampling: SamplingConfig = SamplingConfig()
    """Generation."""
    environment: EnvironmentConfig | None = None
    """An environment that answers between responses. Null: each prompt gets one response."""
    agent: AgentConfig | None = None
    """An agent that has the conversations itself, by OpenAI's protocol. Null: the run asks for the responses."""
    unscored: UnscoredConfig = UnscoredConfig()
    """Responses that the reward service does not score."""
    algorithm: AnyAlgorithm = DEFAULT
    """The algorithm: its `kind` names the estimator of advantages, which decides what else there is to set."""
    policy: PolicyConfig
    """The policy learner."""
    gpu_gib: PositiveFloat | None = None
    """Memory of each GPU in GiB. Before the start, the needs of processes that may share a GPU are added up, and the
    file is refused if they do not fit; `quartet check` prints the sums. Null: no check."""
    host_gib: PositiveFloat | None = None
    """Memory of each machine (host) in GiB, as `free -g` shows it. The needs of the parts that may run on one are
    added up in the same way: staged weights, offloaded states, copies for checkpoints. Null: no check."""
    host_gpus: Count | None = None
    """GPUs of each machine, which limit the parts that are on one in that sum. Parts that ask for different custom
    resources count as on different machines. Null: one machine has all GPUs that the parts ask for."""
    loop: LoopConfig = LoopConfig()
    """Overlap of sampling and training."""
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

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the policy in the whole run."""
        return (self.steps - self.algorithm.steps_without_policy) * self.algorithm.epochs * self._minibatches

    @property
    def optimizer_steps_said(self) -> str:
        """The product that `optimizer_steps` is, by the names of its keys."""
        steps = "(steps - algorithm.critic_only_steps)" if self.algorithm.steps_without_policy else "steps"
        return f"{steps} * algorithm.epochs * minibatches"

    @property
    def critic_optimizer_steps(self) -> int:
        """Optimizer steps of the critic in the whole run, if there is one."""
        return self.steps * self.algorithm.epochs_of_critic * self._minibatches

    @property
    def _minibatches(self) -> int:
        """Minibatches of a batch."""
        return math.ceil(self.batch_size / self.algorithm.minibatch_size)

    @property
    def longest_generate_s(self) -> float:
        """Deadline of a Generate call, which may have to wait for those of all batches under way."""
        return self.timeouts.generate_s * (1 + self.loop.ahead)

    @property
    def longest_take_s(self) -> float:
        """Longest wait of the loop for a batch."""
        times, sampled_s = self.timeouts, self.longest_generate_s
        under_way = self.batch_size * (1 + self.loop.ahead)
        if self.agent is not None:
            sampled_s += self.agent.longest_s(under_way)
        if self.environment is not None:
            turns = self.environment.max_turns
            sampled_s = turns * sampled_s + (turns - 1) * self.environment.longest_answer_s(under_way)
        return times.take_s or sampled_s + times.start_s + 2 * times.score_s

    @property
    def conversation(self) -> EnvironmentConfig | AgentConfig | None:
        """The settings of conversations of several responses; None if each prompt gets one response."""
        return self.environment or self.agent

    @property
    def pushed_adapters(self) -> LoraConfig | None:
        """The policy's adapters, if pushes bring these alone."""
        return self.policy.lora if self.weights.adapters else None

    @property
    def adapter_versions(self) -> int:
        """Versions of adapters that replicas keep: those of all samples that the bound of staleness allows, where
        each is finished with those with which it began."""
        return 1 + self.loop.max_staleness if self.weights.in_flight == "finish" else 1

    @property
    def longest_response(self) -> int:
        """Most tokens after a prompt: of one response, or of a whole conversation."""
        response = self.sampling.max_new_tokens
        return response if self.conversation is None else self.conversation.longest(response)

    @property
    def longest_sequence(self) -> tuple[int, str]:
        """Most tokens of a prompt and what follows it, and the keys that say so."""
        follows = "sampling.max_new_tokens" if self.environment is None else "environment.max_tokens"
        follows = follows if self.agent is None else "agent.max_tokens"
        needed = self.data.max_prompt_length + self.longest_response
        return needed, f"orchestrator.data.max_prompt_length + orchestrator.{follows} is {needed}"

    @property
    def early_logprobs(self) -> bool:
        """True if the learner takes log-probs of finished samples while others are still sampled: at lock-step, where
        its weights stay the same meanwhile, unless it has given its memory to the engines."""
        lock_step = self.loop.max_staleness == 0 and not self.loop.colocate
        return lock_step and self.algorithm.needs_old_logprobs(self.batch_size)

    @property
    def scheduled_policy(self) -> PolicyConfig:
        """The policy's section; a schedule without an end ends with the run."""
        return self.policy.model_copy(update={"optimizer": self.policy.optimizer.for_steps(self.optimizer_steps)})

    @property
    def sized_algorithm(self) -> Algorithm:
        """The algorithm, with the longest response in place of what depends on it."""
        return self.algorithm.sized(self.sampling.max_new_tokens)

    def _problems(self) -> Iterator[str]:
        algorithm = self.algorithm
        if not algorithm.trains_policy(self.steps):
            yield (
                f"algorithm.critic_only_steps ({algorithm.critic_only_steps}, with kind {algorithm.kind}) must be "
                f"less than steps ({self.steps}), or the policy would not learn"
            )
        optimizer = self.policy.optimizer
        if optimizer.schedule == "cosine" and optimizer.warmup_steps >= self.optimizer_steps:
            yield (
                f"policy.optimizer.warmup_steps ({optimizer.warmup_steps}) must be less than the run's "
                f"{self.optimizer_steps} optimizer steps ({self.optimizer_steps_said})"
            )
        if self.algorithm.minibatch_size > self.batch_size:
            yield (
                f"algorithm.minibatch_size ({self.algorithm.minibatch_size}) must not exceed batch_size "
                f"({self.batch_size})"
            )
        if self.batch_size % self.algorithm.samples_per_prompt:
            yield (
                f"batch_size ({self.batch_size}) must be a multiple of algorithm.samples_per_prompt "
                f"({self.algorithm.samples_per_prompt}), so that a batch holds all responses to its prompts"
            )
        buffer, longest = self.algorithm.overlong_buffer, self.sampling.max_new_tokens
        if buffer and self.conversation is not None:
            yield (
                "algorithm.overlong_buffer: is for single responses, and an environment or an agent makes "
                "conversations of several; leave one of them out"
            )
        if buffer > longest:
            yield (
                f"algorithm.overlong_buffer ({buffer}) must not exceed sampling.max_new_tokens ({longest}), of which "
                "it is the last part"
            )
        if self.environment is not None and self.longest_response <= 2 * self.sampling.max_new_tokens:
            yield (
                f"environment.max_tokens ({self.environment.max_tokens}) must be more than twice "
                f"sampling.max_new_tokens ({self.sampling.max_new_tokens}), for two responses and an answer"
            )
        yield from self._problems_of_agent()
        kl = self.algorithm.kl
        # A step changes an adaptive coefficient by up to 0.2 * batch_size / horizon of itself (algorithms/kl.py).
        if kl.target is not None and kl.horizon <= 0.2 * self.batch_size:
            yield f"algorithm.kl.horizon ({kl.horizon:g}) must be more than 0.2 * batch_size ({self.batch_size})"
        if self.services.reference is None and self.algorithm.needs_reference:
            yield (
                f"services.reference: null, but algorithm.kl.coef {self.algorithm.kl.coef:g} penalises the KL to it; "
                "give the service, or set algorithm.kl.coef to 0"
            )
        critic, kind = self.services.critic, self.algorithm.kind
        if critic is None and self.algorithm.needs_critic:
            yield (
                f"services.critic: null, but algorithm.kind {kind} takes its values; give the service, or set "
                f"algorithm.kind to {kinds(critic=False)}"
            )
        if critic not in (None, ServiceConfig()) and not self.algorithm.needs_critic:
            yield f"services.critic: given, but algorithm.kind {kind} trains none; leave it out"
        capped = self.algorithm.clip != "dis" and self.algorithm.correction in ("tis", "tis-sequence")
        if self.loop.max_staleness and capped and self.algorithm.importance_cap is None:
            yield (
                "algorithm.importance_cap: null turns off the importance weights, but with loop.max_staleness "
                f"{self.loop.max_staleness} samples come from older policies; give a number such as 2"
            )
        if self.weights.adapters and self.policy.lora is None:
            yield "weights.adapters: true, but policy.lora is null, so that all weights are trained; leave it out"
        if self.weights.in_flight == "finish" and not self.weights.adapters:
            yield (
                "weights.in_flight: finish is for pushes of adapters alone, of which engines keep several versions; "
                "set weights.adapters to true, or take wait"
            )
        if self.weights.in_flight == "finish" and not self.loop.max_staleness:
            yield "weights.in_flight: finish is for sampling ahead, and loop.max_staleness is 0; leave it out"
        senders = self.weights.senders
        if senders > self.policy.ranks:
            yield f"weights.senders ({senders}) must not exceed policy.ranks ({self.policy.ranks})"
        if self.weights.stage == "gpu" and self.weights.backend not in ("auto", "nccl"):
            yield (
                f"weights.stage: gpu is for weights that NCCL brings; weights.backend {self.weights.backend} has its "
                "own place for them; leave it out"
            )

    def _problems_of_agent(self) -> Iterator[str]:
        agent, sampling = self.agent, self.sampling
        if agent is None:
            return
        if self.environment is not None:
            yield "agent: given, and environment too; an agent answers by itself, so leave one of them out"
        if self.longest_response < sampling.max_new_tokens:
            yield (
                f"agent.max_tokens ({agent.max_tokens}) must be at least sampling.max_new_tokens "
                f"({sampling.max_new_tokens}), which a response may have"
            )
        if sampling.min_new_tokens or sampling.stop_token_ids:
            yield (
                "sampling: min_new_tokens and stop_token_ids are for responses that the run asks for; leave them out "
                "with an agent, whose requests name where they stop"
            )
        if self.data.chat_template:
            yield (
                "data.chat_template: true, but an agent gets the prompt as the data have it, and its requests are "
                "rendered by the template; leave it out. Messages that the data hold are for data.columns: the agent "
                "finds them in task.columns, and data.input_key names a column of text"
            )
        if RESULT in self.data.columns:
            yield f"data.columns: {RESULT} is that of what the agent returns; give the one of the data another name"
