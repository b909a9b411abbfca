"""Facts for a new file, chosen to suit the models, the prompts and the machine."""

from dataclasses import dataclass
from typing import Any

from orchestrator.algorithms.registry import DEFAULT
from orchestrator.commands.init.machine import Machine
from orchestrator.commands.init.prompts import Prompts
from orchestrator.deployment.facts.derive import RESPONSE
from orchestrator.deployment.facts.model import ModelOnDisk
from quartet.config.base import ConfigError

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
KL = 0.05
"""Coefficient of the KL penalty."""
ADAPTERS, FASTER = {"rank": 16}, 10
"""Adapters that are trained where all weights do not fit into memory, and the factor of their learning rates
(Schulman et al. 2025, LoRA Without Regret)."""


@dataclass(frozen=True, slots=True)
class Choices:
    """A user's models, prompts and machine, and the facts chosen for them."""

    policy: ModelOnDisk
    reward: ModelOnDisk | None
    """The reward model; None if a function or a service that runs scores."""
    prompts: Prompts
    machine: Machine
    max_new_tokens: int | None = None
    """The user's choice, if given."""
    adapters: bool = False
    """Train adapters instead of all weights."""

    @property
    def longest(self) -> int:
        """Longest sequence, in tokens, that all models take."""
        return min(model.longest for model in (self.policy, self.reward) if model)

    @property
    def response(self) -> int:
        """Most tokens of a response. ConfigError if the models lack room for them."""
        if self.max_new_tokens:
            if self.max_new_tokens >= self.longest:
                raise ConfigError(f"--max-new-tokens: should be less than the {self.longest} that the models take")
            return self.max_new_tokens
        # Half of the room is kept for prompts; longer prompts are left out.
        most = min(RESPONSE, self.longest // 2)
        if most < LEAST_RESPONSE:
            raise ConfigError(
                f"--model: takes {self.longest} tokens in all, which leaves fewer than {LEAST_RESPONSE} for a "
                "response"
            )
        return most

    @property
    def prompt(self) -> int:
        """Most tokens of a prompt: the longest one's, rounded up for later prompts, if there is room. ConfigError if
        there is room for none."""
        room, shortest = self.longest - self.response, self.prompts.shortest
        if shortest >= self.longest:
            raise ConfigError(
                f"--prompts: the shortest has {shortest} tokens, and the models take {self.longest} in all"
            )
        if shortest > room:
            raise ConfigError(
                f"--max-new-tokens: {self.response} of the {self.longest} tokens that the models take leave {room} "
                f"for a prompt, and the shortest has {shortest}; give {self.longest - shortest} or fewer"
            )
        return min(-(-self.prompts.longest // 8) * 8, room)

    @property
    def batch(self) -> int:
        """Samples in a step: a power of two."""
        return 1 << (min(BATCH, self.prompts.count).bit_length() - 1)

    @property
    def threads(self) -> int:
        """Threads of each process on the CPU. Policy and critic train at the same time."""
        small = self.policy.parameters < SMALL_MODEL and not self.machine.gpus
        return 1 if small else max(1, self.machine.cores // 2)

    @property
    def rates(self) -> tuple[float, float]:
        """Learning rates of policy and critic."""
        fitting = ((policy, critic) for most, policy, critic in RATES if self.policy.parameters < most)
        policy, critic = next(fitting, LARGE_RATES)
        factor = FASTER if self.adapters else 1
        return float(f"{factor * policy:.3g}"), float(f"{factor * critic:.3g}")

    def facts(self, name: str, model: str, reward: str, data: str) -> dict[str, Any]:
        """The facts of a file, without those that are derived alike.

        Args:
            name: the run's name.
            model: the user's name of the policy.
            reward: the user's name of the reward model or function.
            data: the user's name of the prompts.
        """
        rate, critic_rate = self.rates
        facts: dict[str, Any] = {
            "name": name,
            "model": model,
            "reward": reward,
            "prompts": {"path": data} | self._data,
        }
        facts["algorithm"] = {"kind": DEFAULT.kind, "learning_rate": rate, "critic_learning_rate": critic_rate}
        facts["algorithm"] |= {"kl": {"coef": KL}}
        facts["machine"] = self._machine
        facts |= {"lora": ADAPTERS} if self.adapters else {}
        facts |= {} if self.batch == BATCH else {"batch_size": self.batch}
        facts |= {"max_new_tokens": self.max_new_tokens} if self.max_new_tokens else {}
        each = min(MOST_EACH, -(-EVALUATED // max(1, self.prompts.evaluated)))
        if self.prompts.held_out is not None and each > 1:
            facts["orchestrator"] = {"evaluation": {"samples_per_prompt": each}}
        return facts

    @property
    def _data(self) -> dict[str, Any]:
        prompts = self.prompts
        data: dict[str, Any] = {} if prompts.input_key == "prompt" else {"input_key": prompts.input_key}
        data |= {} if prompts.label_key is None else {"label_key": prompts.label_key}
        data |= {"chat_template": True} if prompts.chat_template else {}
        data |= {} if prompts.train == "train" else {"prompt_split": prompts.train}
        data |= {} if prompts.held_out is None else {"eval_split": prompts.held_out}
        data |= {"split_seed": 0} if prompts.shuffled else {}
        return data | {"max_prompt_length": self.prompt}

    @property
    def _machine(self) -> dict[str, Any]:
        machine = self.machine
        gpus = {"gpus": machine.gpus, "gpu_gib": int(machine.gpu_gib)} if machine.gpus else {}
        return {"threads": self.threads, "host_gib": int(machine.memory_gib)} | gpus
