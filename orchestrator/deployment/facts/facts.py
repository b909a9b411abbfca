"""The facts of a run: what a person decides, each once. Everything else is derived from them (derive.py)."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat

from orchestrator.config.data import PromptsConfig
from orchestrator.config.run import OrchestratorConfig
from orchestrator.deployment.applications import SERVICES
from orchestrator.environments.config import AgentConfig, EnvironmentConfig
from quartet.config.base import Config, ConfigError, Count, Dtype, PortNumber, Seed
from quartet.config.explain import shown, unknown, unknown_keys
from quartet.config.learner import LoraConfig

DEPLOYMENT_KEYS = frozenset(
    {
        *("num_replicas", "max_ongoing_requests", "max_queued_requests", "backpressure_config", "user_config"),
        *("autoscaling_config", "graceful_shutdown_wait_loop_s", "graceful_shutdown_timeout_s"),
        *("health_check_period_s", "health_check_timeout_s", "ray_actor_options", "placement_group_bundles"),
        *("placement_group_strategy", "placement_group_bundle_label_selector", "max_replicas_per_node"),
        *("logging_config", "request_router_config", "gang_scheduling_config", "deployment_actors"),
        *("rolling_update_percentage", "max_surge_percent"),
    }
)
"""Serve's options of a deployment but for its name, which a service's section may set; a test compares them with
Serve's schema, whose import takes seconds."""
APPLICATION_KEYS = frozenset({"runtime_env", "route_prefix"})
"""Serve's options of an application that a service's section may set."""

_STATED = {
    "name": "name",
    "target": "port",
    "seed": "seed",
    "steps": "steps",
    "batch_size": "batch_size",
    "algorithm": "algorithm",
    "gpu_gib": "machine.gpu_gib",
    "host_gib": "machine.host_gib",
    "data": "prompts",
    "sampling.max_new_tokens": "max_new_tokens",
    "environment": "environment",
    "agent": "agent",
    "policy.model": "model",
    "policy.dtype": "dtype",
    "policy.optimizer.learning_rate": "algorithm.learning_rate",
}
"""Key of `orchestrator:` -> the fact that states it."""
CRITIC_RATE = "algorithm.critic_learning_rate"
"""The fact that states the critic's learning rate."""


class PromptsFacts(PromptsConfig):
    """Source of the prompts. Text alone is its `path`."""

    path: str
    """A .jsonl, .json or .parquet file, a folder of such files named after splits (train.jsonl, eval.jsonl), a
    Hugging Face data set saved with `save_to_disk`, or a data set of the hub, as ORG/NAME@REVISION or
    ORG/NAME@REVISION/FOLDER."""
    max_prompt_length: Count | None = None
    """Longest prompt, in tokens; longer ones are left out, and their number is reported. Null: what the models leave
    beside a response, 1024 at most."""


class AlgorithmFacts(Config):
    """The algorithm and its learning rates. Every other key is one of `orchestrator.algorithm`
    (orchestrator/algorithms/contract.py and the file of the kind)."""

    model_config = ConfigDict(extra="allow")

    kind: str
    """The estimator of advantages: ppo, with a critic, or one without; docs/algorithm.md lists them."""
    learning_rate: PositiveFloat
    """Peak learning rate of the policy: the first thing to tune. From 1e-6 for billions of parameters to 1e-4 for
    millions."""
    critic_learning_rate: PositiveFloat | None = None
    """Peak learning rate of the critic, with an algorithm that trains one. Null: five times the policy's."""

    @property
    def settings(self) -> dict[str, Any]:
        """The other keys."""
        return dict(self.model_extra or {})


class MachineFacts(Config):
    """The machine, or each of several equal ones."""

    gpus: NonNegativeInt = 0
    """GPUs of the run. 0: everything on the CPU. 1: all parts share it. More: half of them sample, one replica each,
    and learners, reference and reward model share the rest; docs/placement.md has other layouts."""
    gpu_gib: PositiveFloat | None = None
    """Memory of each GPU in GiB, as nvidia-smi shows it. `quartet check` then adds up what may share one. Null: no
    check, and what depends on it is chosen for 16."""
    host_gib: PositiveFloat | None = None
    """Memory of the host in GiB, as `free -g` shows it. `quartet check` then adds up what is in it. Null: no check,
    and what depends on it is chosen for 16."""
    threads: Count | None = None
    """Threads of each process on the CPU. Null: 1 without GPUs, else as many as Ray gives it cores."""


class Facts(Config):
    """A run in the words of its user: what is trained, by which reward, on which prompts, how, and where."""

    name: str
    """The run's name: results go to runs/<name>. Letters, digits, `_`, `-` and `.`."""
    model: str
    """The language model to train: a folder in Hugging Face's format; or ORG/NAME@REVISION of the Hugging Face hub,
    where REVISION is a commit, a tag or a branch, fetched once and pinned in a lock beside this file."""
    reward: str | dict[str, Any]
    """A reward model, as a folder or ORG/NAME@REVISION; a Python function, as package.module:function; the address of
    a reward service that runs, as host:port or, with the name of one of its scorers, host:port/NAME; or a whole
    `scorer` (services/reward/config.py)."""
    prompts: PromptsFacts
    """Source of the prompts: a file or folder; ORG/NAME@REVISION of a data set, or ORG/NAME@REVISION/FOLDER if
    several of its folders hold data; or a mapping with `path`, columns and splits."""
    algorithm: AlgorithmFacts
    """The algorithm and its learning rates."""
    critic: str | None = None
    """Model that the critic starts from, with an algorithm that trains one. Null: the reward model if there is one,
    else the model to train."""
    steps: Count = 100
    """Steps of the run: each samples a batch, trains on it and pushes the weights."""
    batch_size: Count = 128
    """Responses in a step."""
    max_new_tokens: Count | None = None
    """Longest response, in tokens. Null: half of what the models take, 256 at most; with an environment or an agent
    less, so that a conversation has room."""
    environment: EnvironmentConfig | None = None
    """An environment that answers between responses: its `kind`, as package.module:Class, and the bounds of a
    conversation. Text alone is its `kind`. Null: each prompt gets one response."""
    agent: AgentConfig | None = None
    """An agent that has conversations with the model by OpenAI's protocol: its `kind`, as package.module:function,
    and the bounds of a conversation. Text alone is its `kind`. Needs `security: {http: true}`. Null: the run asks for
    the responses."""
    seed: Seed = 0
    """Seed of the prompt order, the sampling and the minibatch order."""
    dtype: Dtype | None = None
    """Arithmetic of all models. Null: bfloat16 with GPUs, else float32."""
    lora: LoraConfig | None = None
    """Train low-rank adapters of policy and critic instead of their weights. Null: all weights."""
    packing: bool | None = None
    """Passes of all models but the engine's without padding. Null: where a model's attention allows it."""
    batch_tokens: Count | None = None
    """Most tokens in one pass of each model but the engine's. Null: what the memory of the machine allows."""
    machine: MachineFacts = MachineFacts()
    """The machine."""
    port: PortNumber = 19000
    """The gRPC port, through which all services are called."""
    http_port: PortNumber = 18000
    """Serve's HTTP port, on which nothing answers unless `security.http` is true (docs/openai.md,
    docs/reward-http.md)."""
    security: dict[str, Any] | None = None
    """The gRPC port's address and policy, and whether the HTTP port is open (quartet/security/port.py). Null: only
    this user, on this machine, by gRPC."""
    services: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Derived keys of services that are set by hand: rollout, reward, reference or critic -> a key of its `args`
    (services/<name>/config.py) or an option of Serve's for its deployment, such as `num_replicas`. Mappings are
    merged."""
    orchestrator: dict[str, Any] = Field(default_factory=dict)
    """Derived keys of the orchestrator that are set by hand (orchestrator/config/). Mappings are merged."""

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        """The facts in a file.

        Raises:
            ConfigError: a line for each wrong field.
        """
        values = {key: value for key, value in raw.items() if key != "shared"}
        for fact, field in (("prompts", "path"), ("environment", "kind"), ("agent", "kind")):
            if isinstance(text := values.get(fact), str):
                values[fact] = {field: text}
        problems = list(_repeated(values))
        try:
            facts = cls.parse(values, "")
        except ConfigError as error:
            problems.insert(0, str(error))
            raise ConfigError("\n".join(problems)) from None
        problems += _unknown_overrides(facts.services)
        problems += _stated_twice(facts)
        problems += unknown_keys(OrchestratorConfig, facts.orchestrator, "orchestrator")
        if problems:
            raise ConfigError("\n".join(problems))
        return facts


TELLING = frozenset({"model", "reward", "prompts", "algorithm"})
"""Facts by which a file is known to state facts, as a full file has no such sections."""


def _repeated(values: Mapping[str, Any]) -> list[str]:
    """Overrides of keys that are facts themselves, each of which is to be stated once."""
    section = values.get("orchestrator")
    return [
        f"orchestrator.{key}: is stated by {fact}; set that, and leave this out"
        for key, fact in _STATED.items()
        if _given(section, key.split("."))
    ]


def _stated_twice(facts: Facts) -> list[str]:
    """Overrides of the critic beside the fact that is for the same key alone, which would have no effect."""
    stated = {
        "model": ("critic", facts.critic),
        "optimizer.learning_rate": (CRITIC_RATE, facts.algorithm.critic_learning_rate),
    }
    return [
        f"services.critic.{key}: is stated by {fact}; leave one of them out"
        for key, (fact, value) in stated.items()
        if value is not None and _given(facts.services.get("critic"), key.split("."))
    ]


def _given(section: Any, path: list[str]) -> bool:
    for key in path:
        if not isinstance(section, Mapping) or key not in section:
            return False
        section = section[key]
    return True


def _unknown_overrides(services: Mapping[str, Mapping[str, Any]]) -> list[str]:
    problems = []
    for name, given in services.items():
        if name not in SERVICES:
            problems.append(f"services.{name}: {unknown(name, set(SERVICES), 'service')}")
            continue
        config = SERVICES[name].config
        known = set(config.model_fields) | DEPLOYMENT_KEYS | APPLICATION_KEYS
        problems += [f"services.{name}.{key}: {unknown(key, known)}" for key in given if key not in known]
        args = {key: value for key, value in given.items() if key in config.model_fields}
        problems += unknown_keys(config, args, f"services.{name}")
        replicas = given.get("num_replicas", 1)
        if "autoscaling_config" in given and "num_replicas" in given:
            problems.append(f"services.{name}.num_replicas: autoscaling_config says how many; give one of them")
        elif isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
            problems.append(f"services.{name}.num_replicas: should be 1 or more, got {shown(replicas)}")
    return problems
