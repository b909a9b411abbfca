"""Values for a new file, chosen to suit the models, the prompts and the machine."""

import math
from dataclasses import dataclass
from typing import Any

import yaml

from orchestrator.commands.init.machine import Machine
from orchestrator.commands.init.model import Model
from orchestrator.commands.init.prompts import Prompts
from quartet.config.base import GIB, MIB, ConfigError

RESPONSE = 256
"""Most tokens of a response, if half of what the models take is as much."""
EVALUATED = 64
"""Responses of an evaluation, if there are as many held-out prompts; of fewer, several to each."""
MOST_EACH = 8
"""Most responses to a held-out prompt."""
LEAST_RESPONSE = 8
"""Fewest tokens that must be left for a response."""
BATCH = 128
"""Samples in a step, if there are as many prompts."""
SMALL_MODEL = 5_000_000
"""Parameters below which a second thread does not make a model faster."""
RATES = ((10_000_000, 2e-4, 1e-3), (100_000_000, 5e-5, 2e-4), (1_000_000_000, 5e-6, 2e-5))
"""(limit, policy's rate, critic's rate): learning rates for models with fewer parameters than the limit."""
LARGE_RATES = (1e-6, 9e-6)
"""Learning rates of policy and critic for larger models."""
PASS = 2048
"""Most tokens in a pass of reward model and reference on a CPU. Of passes of 256 to 16,384 tokens these were among
the fastest for 20 million parameters."""


@dataclass(frozen=True, slots=True)
class Choices:
    """A user's models, prompts and machine, and the values chosen for them."""

    policy: Model
    reward: Model | None
    """The reward model; None if a function scores."""
    function: str | None
    prompts: Prompts
    machine: Machine
    max_new_tokens: int | None = None
    """The user's choice, if given."""

    @property
    def gpu(self) -> bool:
        """True if the file is for a GPU."""
        return self.machine.gpus > 0

    @property
    def dtype(self) -> str:
        """Arithmetic of all models."""
        return "bfloat16" if self.gpu else "float32"

    @property
    def old_logprobs(self) -> str:
        """Log-probs that the update takes the ratio to: the engine's, if they are equal to the learner's but for
        float32's rounding."""
        return "rollout" if self.dtype == "float32" else "learner"

    @property
    def longest(self) -> int:
        """Longest sequence, in tokens, that all models take."""
        return min(model.longest for model in (self.policy, self.reward) if model)

    @property
    def response(self) -> int:
        """Most tokens of a response. ConfigError if the models lack room for them."""
        if self.max_new_tokens and self.max_new_tokens >= self.longest:
            raise ConfigError(f"--max-new-tokens: should be less than the {self.longest} that the models take")
        # Half of the room is kept for prompts; longer prompts are left out.
        room = max(self.longest - self._longest_prompt, self.longest // 2)
        wanted = self.max_new_tokens or min(RESPONSE, room, max(LEAST_RESPONSE, self.longest // 2))
        if wanted < min(LEAST_RESPONSE, self.max_new_tokens or LEAST_RESPONSE):
            raise ConfigError(
                f"--policy: takes {self.longest} tokens in all, which leaves fewer than {LEAST_RESPONSE} for a "
                "response"
            )
        return wanted

    @property
    def prompt(self) -> int:
        """Most tokens of a prompt."""
        return min(self._longest_prompt, self.longest - self.response)

    @property
    def _longest_prompt(self) -> int:
        """The longest prompt's tokens, rounded up to leave room for later prompts."""
        return -(-self.prompts.longest // 8) * 8

    @property
    def batch(self) -> int:
        """Samples in a step: a power of two."""
        return 1 << (min(BATCH, self.prompts.count).bit_length() - 1)

    @property
    def threads(self) -> int:
        """Threads of each process on the CPU. Policy and critic train at the same time."""
        return 1 if self._small else max(1, self.machine.cores // 2)

    @property
    def _small(self) -> bool:
        return self.policy.parameters < SMALL_MODEL and not self.gpu

    @property
    def batch_tokens(self) -> int:
        """Tokens in a pass: a power of two whose logits and their gradient fit a sixteenth of the memory."""
        memory = (self.machine.gpu_gib if self.gpu else self.machine.memory_gib) * GIB
        room = int(memory / 16 / (3 * 4 * self.policy.vocabulary))
        return max(1024, min(16_384, 1 << max(0, room.bit_length() - 1)))

    @property
    def pass_tokens(self) -> int:
        """Tokens in a pass of reward model and reference."""
        return self.batch_tokens if self.gpu else min(PASS, self.batch_tokens)

    @property
    def kv_cache(self) -> int:
        """MiB for keys and values of all responses that are sampled at the same time, or an eighth of the memory."""
        memory = (self.machine.gpu_gib if self.gpu else self.machine.memory_gib) * 1024
        whole = self.batch * (self.prompt + self.response + 128) * self.policy.cached(self.dtype)
        return max(64, min(-(-whole // MIB), int(memory / 8)))

    @property
    def rates(self) -> tuple[float, float]:
        """Learning rates of policy and critic."""
        fitting = ((policy, critic) for most, policy, critic in RATES if self.policy.parameters < most)
        return next(fitting, LARGE_RATES)


class Plain(str):
    """Text for the file that is not quoted: a comment, or YAML."""


def values(choices: Choices) -> dict[str, str]:
    """Template name -> text."""
    chosen = _data(choices) | _learning(choices) | _machine(choices)
    return {name: _yaml(value) for name, value in chosen.items()}


def _yaml(value: Any) -> str:
    """The value as YAML in one line."""
    if isinstance(value, Plain):
        return value
    line = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False)
    return line.removesuffix("...\n").strip()


def _data(choices: Choices) -> dict[str, Any]:
    prompts = choices.prompts
    held_out = prompts.held_out or prompts.train
    return {
        "prompts": prompts.path,
        "input_key": prompts.input_key,
        "label_key": prompts.label_key,
        "chat_template": prompts.chat_template,
        "prompt_split": prompts.train,
        "eval_split": held_out,
        "split_seed": 0 if prompts.shuffled else None,
        "evaluate_every": 10 if prompts.held_out else 0,
        "samples_each": min(MOST_EACH, -(-EVALUATED // max(1, prompts.evaluated))),
        "max_prompt_length": choices.prompt,
        "longest_why": Plain(f"tokens; the longest has {prompts.longest}; prompts beyond this limit are left out"),
        "max_new_tokens": choices.response,
        "max_length": choices.prompt + choices.response,
        "batch_size": choices.batch,
        "max_num_seqs": max(2, choices.batch),
        "minibatch_size": max(1, choices.batch // 4),
        "prompts_per_call": min(64, choices.batch),
    }


def _learning(choices: Choices) -> dict[str, Any]:
    policy, critic = choices.policy, choices.reward or choices.policy
    policy_rate, critic_rate = choices.rates
    if choices.reward:
        scorer: dict[str, Any] = {"kind": "model", "model": choices.reward.folder, "dtype": choices.dtype}
        scorer |= {"batch_tokens": choices.pass_tokens, "packing": choices.reward.packs}
        starts = "it starts from the reward model, which knows the task best"
    else:
        scorer = {"kind": "function", "function": choices.function}
        starts = "there is no reward model to start from"
    return {
        "policy": policy.folder,
        "policy_path": Plain(policy.folder),
        "parameters": Plain(policy.size),
        "dtype": choices.dtype,
        "scorer": scorer,
        "critic": critic.folder,
        "critic_why": Plain(starts),
        "packing": policy.packs,
        "packing_why": Plain(_packing(policy)),
        "critic_packing": critic.packs,
        "critic_packing_why": Plain(_packing(critic)),
        "old_logprobs": choices.old_logprobs,
        "old_logprobs_why": Plain(
            "the engine's, which save a pass; in float32 the policy's own are the same but for rounding"
            if choices.old_logprobs == "rollout"
            else "the policy's own, since in bfloat16 the engine's differ from them"
        ),
        "normalise": choices.reward is None or not hasattr(choices.reward.config, "reward_std"),
        "normalise_why": Plain("by their running mean and deviation, unless the reward model does it with its own"),
        "policy_rate": policy_rate,
        "critic_rate": critic_rate,
    }


def _machine(choices: Choices) -> dict[str, Any]:
    gpu, threads = choices.gpu, choices.threads
    environment = {"OMP_NUM_THREADS": str(threads)}
    if threads > 1:  # idle threads would spin on cores that another process needs
        environment |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    if not gpu:
        environment["TORCHDYNAMO_DISABLE"] = "1"
        # glibc would give back tensors of more than 32 MiB after each use, and the next one would have to be mapped
        # and cleared again.
        environment["MALLOC_MMAP_MAX_"] = "0"
    cpus = 1 if gpu else 0.2  # of the cores that Ray counts; processes of a small machine share them
    why = f"{threads} {'thread' if threads == 1 else 'threads'} each, for the {choices.machine.cores} cores here"
    why += "" if gpu else "; MALLOC_MMAP_MAX_ has them keep the memory of large tensors"
    return {
        "threads_why": Plain(why),
        "environment": environment,
        "kv_cache_mib": choices.kv_cache,
        "kv_cache_why": Plain("room for the keys and values of what is sampled at the same time"),
        "batch_tokens": choices.batch_tokens,
        "pass_tokens": choices.pass_tokens,
        "zero_stage": 1 if gpu else 0,
        "checkpointing": "auto" if gpu else False,
        "policy_cpus": cpus,
        "policy_gpus": 0.3 if gpu else 0,
        "rollout_actor": _shares(cpus, 0.2 if gpu else 0),
        "frozen_actor": _shares(cpus, 0.1 if gpu else 0),
        "learner_actor": _shares(cpus, 0.3 if gpu else 0),
        "gpu_gib": Plain(f"  gpu_gib: {choices.machine.gpu_gib:.0f}  # of one GPU, which all share\n" if gpu else ""),
    }


def _shares(cpus: float, gpus: float) -> dict[str, float]:
    return {"num_cpus": cpus} | ({"num_gpus": gpus} if gpus else {})


def _packing(model: Model) -> str:
    return "sequences one after another, without padding" if model.packs else "its attention does not allow packing"
