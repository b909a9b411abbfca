"""The whole file, with every service's section, derived from the facts of a run."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.algorithms.registry import parse
from orchestrator.deployment.applications import SERVICES
from orchestrator.deployment.facts.facts import CRITIC_RATE, DEPLOYMENT_KEYS, Facts
from orchestrator.environments.config import AgentConfig, EnvironmentConfig
from quartet.config.base import GIB, IDLE_THREADS_SLEEP, MIB, ConfigError
from quartet.config.functions import PATH
from quartet.security.port import GUARD

if TYPE_CHECKING:  # which loads torch
    from orchestrator.deployment.facts.model import ModelOnDisk

FUNCTION = re.compile(PATH)
"""The form of `package.module:function`."""
TARGET = re.compile(r"(?:grpcs?://)?(?P<target>[\w.\[\]:-]+:\d{1,5})(?:/(?P<scorer>[A-Za-z][\w-]*)?)?")
"""The form of the address of a reward service that runs, with or without the name of one of its scorers."""
RESPONSE, PROMPT = 256, 1024
"""Most tokens of a response and of a prompt, where models take as many."""
USUAL_GIB = 16.0
"""Memory for which values are chosen that depend on it, where the facts do not tell."""
PASS = 2048
"""Most tokens in a pass of reward model and reference on a CPU. Of passes of 256 to 16,384 tokens these were among
the fastest for 20 million parameters."""
REWARD_LENGTH = 4096
"""Longest pair that a reward service takes by default."""
SHARE_OF_CORE = 0.2
"""CPUs that Ray counts for each process on a machine without GPUs, on which all share the cores."""


ModelAt = Callable[[str, str], "ModelOnDisk"]
"""Gives the model in a folder, which stands at a field of the facts."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The share of each part in the machine's CPUs and GPUs."""

    cpus: float
    rollout: float
    """GPUs of a rollout replica."""
    frozen: float
    """GPUs of the reward service, and of the reference if `reference` is 0."""
    policy: float
    """GPUs of a rank of the policy."""
    critic: float
    reference: float = 0.0
    replicas: int = 1
    """Rollout replicas."""
    policy_ranks: int = 1
    critic_ranks: int = 1

    @classmethod
    def of(cls, gpus: int) -> "Layout":
        """The layout for a number of GPUs."""
        if gpus == 0:
            return cls(SHARE_OF_CORE, 0, 0, 0, 0)
        if gpus == 1:
            return cls(1, rollout=0.2, frozen=0.1, policy=0.3, critic=0.3)
        replicas = gpus // 2
        if (rest := gpus - replicas) == 1:
            return cls(1, rollout=1, frozen=0.1, policy=0.4, critic=0.4, replicas=replicas)
        ranks = rest // 2
        return cls(
            1, 1, 0.1, 0.6, 0.8, reference=0.3, replicas=replicas, policy_ranks=ranks, critic_ranks=rest - ranks
        )


def derive(facts: Facts, model_at: ModelAt) -> dict[str, Any]:
    """The whole file.

    Args:
        facts: the facts, whose models and data are folders and files.
        model_at: asked only about models on which a value depends that the facts do not set.

    Raises:
        ConfigError: a fact is wrong, or a model cannot be read.
    """
    return _Derivation(facts, model_at).file()


class _Derivation:
    """The sections, each value once. A value that depends on a model is a function until overrides are merged."""

    def __init__(self, facts: Facts, model_at: ModelAt) -> None:
        self._facts, self._model_at = facts, model_at
        self._gpus = facts.machine.gpus
        self._layout = Layout.of(self._gpus)
        self._algorithm = {"kind": facts.algorithm.kind} | facts.algorithm.settings
        self._parsed = parse(self._algorithm)

    def file(self) -> dict[str, Any]:
        """All sections."""
        facts = self._facts
        applications = [self._application(name) for name in self._names]
        orchestrator = merged(self._orchestrator(), facts.orchestrator, "orchestrator")
        return whole(facts.security, facts.port, facts.http_port, applications, orchestrator=orchestrator)

    @property
    def _names(self) -> list[str]:
        left_out = {
            "reward": self._target is not None,
            "reference": not (self._parsed.needs_reference or "reference" in self._facts.services),
            "critic": not self._parsed.needs_critic,
        }
        why = {"reward": "reward: is a service that runs elsewhere"}
        problems = [
            f"services.{name}: this run starts none ({why.get(name, 'the algorithm needs none')}); leave it out"
            for name in self._facts.services
            if left_out.get(name)
        ]
        if left_out["critic"]:
            algorithm = self._parsed
            given = {"critic": self._facts.critic, CRITIC_RATE: self._facts.algorithm.critic_learning_rate}
            problems += [
                f"{fact}: this run trains no critic, as algorithm has kind {algorithm.kind} with baseline "
                f"{algorithm.baseline}; leave it out"
                for fact, value in given.items()
                if value is not None
            ]
        if problems:
            raise ConfigError("\n".join(problems))
        return [name for name in SERVICES if not left_out.get(name)]

    @cached_property
    def _dtype(self) -> str:
        return self._facts.dtype or ("bfloat16" if self._gpus else "float32")

    @cached_property
    def _target(self) -> dict[str, str] | None:
        """Address of the reward service, and the name of its scorer if it is given, if the service runs elsewhere."""
        reward = self._facts.reward
        match = TARGET.fullmatch(reward) if isinstance(reward, str) else None
        return {key: value for key, value in match.groupdict().items() if value} if match else None

    @cached_property
    def _scorer(self) -> dict[str, Any]:
        reward = self._facts.reward
        if isinstance(reward, Mapping):
            return dict(reward)
        if not Path(reward).is_dir() and FUNCTION.fullmatch(reward):
            return {"kind": "function", "function": reward}
        return {"kind": "model", "model": reward, "dtype": self._dtype} | self._passes(reward, "reward")

    @property
    def _reward_model(self) -> str | None:
        # Another kind's `model`, such as a judge's, is a name at its endpoint.
        return None if self._target or self._scorer.get("kind") != "model" else self._scorer.get("model")

    @property
    def _critic_model(self) -> str:
        return self._facts.critic or self._reward_model or self._facts.model

    def _passes(self, model: str, field: str) -> dict[str, Any]:
        """The passes of a model that is never trained."""
        return {"batch_tokens": self._pass_tokens, "packing": self._packing(model, field)}

    def _packing(self, model: str, field: str) -> Any:
        packing = self._facts.packing
        return (lambda: self._model_at(model, field).packs) if packing is None else packing

    @property
    def _longest(self) -> int:
        """Longest sequence that all models take."""
        return self._shortest[0]

    @cached_property
    def _shortest(self) -> tuple[int, str, str]:
        """Longest sequence of the model that takes the shortest ones, its fact and its folder."""
        models = {"model": self._facts.model} | ({"reward": self._reward_model} if self._reward_model else {})
        models |= {"critic": self._facts.critic} if self._parsed.needs_critic and self._facts.critic else {}
        lengths = ((self._model_at(folder, fact).longest, fact, folder) for fact, folder in models.items())
        return min(lengths, key=lambda each: each[0])

    @cached_property
    def _response(self) -> int:
        if self._facts.max_new_tokens:
            return self._facts.max_new_tokens
        conversation, half = self._conversation, self._longest // 2
        if conversation is None:
            most = half
        elif conversation.max_tokens:  # which two responses and an answer have to fit
            most = min(half, (conversation.max_tokens - 1) // 2)
        else:
            most = half // conversation.parts
        return min(RESPONSE, max(1, most))

    @cached_property
    def _follows(self) -> int:
        """Most tokens after a prompt."""
        conversation = self._conversation
        return self._response if conversation is None else conversation.longest(self._response)

    @property
    def _conversation(self) -> EnvironmentConfig | AgentConfig | None:
        return self._facts.environment or self._facts.agent

    @cached_property
    def _prompt(self) -> int:
        given, response = self._facts.prompts.max_prompt_length, self._facts.max_new_tokens
        if given and response:
            return given  # `quartet check` compares their sum with each model
        prompt = given or min(PROMPT, max(1, self._longest - self._follows))
        if prompt + self._follows > self._longest:
            raise ConfigError(self._too_long(prompt))
        return prompt

    def _too_long(self, prompt: int) -> str:
        """The problem of facts that make sequences longer than the models take."""
        facts, conversation, (longest, model, folder) = self._facts, self._conversation, self._shortest
        bound = conversation and conversation.max_tokens
        given = {
            "prompts.max_prompt_length": facts.prompts.max_prompt_length,
            "max_new_tokens": None if bound else facts.max_new_tokens,
            "environment.max_tokens" if facts.environment else "agent.max_tokens": bound,
        }
        return (
            f"{' and '.join(fact for fact, value in given.items() if value) or model}: sequences would have "
            f"{prompt + self._follows} tokens, {prompt} of them a prompt's, but {model} ({folder}) takes {longest}; "
            "give less"
        )

    @property
    def _memory_gib(self) -> float:
        machine = self._facts.machine
        return (machine.gpu_gib if self._gpus else machine.host_gib) or USUAL_GIB

    def _most_tokens(self) -> int:
        """Tokens in a pass: a power of two whose logits and their gradient fit a sixteenth of the memory."""
        if self._facts.batch_tokens:
            return self._facts.batch_tokens
        vocabulary = self._model_at(self._facts.model, "model").vocabulary
        room = int(self._memory_gib * GIB / 16 / (3 * 4 * vocabulary))
        return max(1024, min(16_384, 1 << max(0, room.bit_length() - 1)))

    def _pass_tokens(self) -> int:
        """Tokens in a pass of reward model and reference."""
        most = self._most_tokens()
        return most if self._gpus or self._facts.batch_tokens else min(PASS, most)

    def _kv_cache(self) -> int:
        """MiB for keys and values of all responses that are sampled at the same time, or an eighth of the memory."""
        cached = self._model_at(self._facts.model, "model").cached(self._dtype)
        whole = self._facts.batch_size * (self._prompt + self._follows + 128) * cached
        return max(64, min(-(-whole // MIB), int(self._memory_gib * 1024 / 8)))

    @cached_property
    def _environment(self) -> dict[str, str]:
        return environment_of(self._gpus, self._facts.machine.threads)

    def _application(self, name: str) -> dict[str, Any]:
        service, layout = SERVICES[name], self._layout
        given = dict(self._facts.services.get(name, {}))
        replicas = given.pop("num_replicas", layout.replicas if name == "rollout" else 1)
        gpus = {"rollout": layout.rollout, "reward": layout.frozen, "reference": layout.reference or layout.frozen}
        deployment: dict[str, Any] = {"name": service.deployment}
        if name == "critic":
            deployment["num_replicas"] = replicas
            ranks = given.get("ranks", layout.critic_ranks)
            gpus["critic"] = layout.critic if ranks == 1 else 0
        elif "autoscaling_config" not in given:
            # From the start: a file that gains it later would restart every replica.
            deployment["autoscaling_config"] = {"min_replicas": replicas, "max_replicas": replicas}
        deployment["ray_actor_options"] = shares(layout.cpus, gpus[name])
        application: dict[str, Any] = {
            "name": name,
            "route_prefix": given.pop("route_prefix", f"/{name}"),
            "import_path": service.import_path,
        }
        environment = {"env_vars": self._environment} if self._environment else {}
        if environment := merged(environment, given.pop("runtime_env", {}), f"services.{name}.runtime_env"):
            application["runtime_env"] = environment
        options = {key: given.pop(key) for key in list(given) if key in DEPLOYMENT_KEYS}
        args = {
            "rollout": self._rollout,
            "reward": self._reward,
            "reference": self._reference,
            "critic": self._critic,
        }
        application["args"] = merged(args[name](), given, f"services.{name}")
        application["deployments"] = [merged(deployment, options, f"services.{name}")]
        return application

    def _rollout(self) -> dict[str, Any]:
        args: dict[str, Any] = {"model": self._facts.model, "dtype": self._dtype, "max_length": self._whole}
        args["max_num_seqs"] = min(256, max(2, self._facts.batch_size))
        if self._facts.lora and self._set("weights", "adapters") is True:
            args["adapters"] = self._lora
            if self._set("weights", "in_flight") == "finish":
                stale = self._set("loop", "max_staleness")
                args["adapter_versions"] = 1 + (stale if isinstance(stale, int) else 0)
        # Of a GPU of its own the engine takes what is left.
        return args | ({"kv_cache_mib": self._kv_cache} if self._layout.rollout < 1 else {})

    def _whole(self) -> int:
        """Longest prompt and what follows it, in tokens."""
        return max(3, self._prompt + self._follows)

    def _reward(self) -> dict[str, Any]:
        # Others may have it score longer pairs than the run does.
        args = {"tokenizer": self._facts.model, "scorer": self._scorer}
        response, conversation = self._facts.max_new_tokens or RESPONSE, self._conversation
        follows = response if conversation is None else conversation.longest(response)
        known = (self._facts.prompts.max_prompt_length or PROMPT) + follows
        return args | ({"max_length": self._whole} if known > REWARD_LENGTH else {})

    def _reference(self) -> dict[str, Any]:
        model = self._facts.model
        return {"model": model, "dtype": self._dtype} | self._passes(model, "model")

    def _critic(self) -> dict[str, Any]:
        facts = self._facts
        # Rounded, since 5 times 1e-6 is 4.9999999999999996e-06.
        rate = facts.algorithm.critic_learning_rate or float(f"{5 * facts.algorithm.learning_rate:.12g}")
        own = facts.services.get("critic", {})
        given = own.get("ranks", self._layout.critic_ranks)
        args = self._learner(self._critic_model, "critic" if facts.critic else "reward", given)
        args["optimizer"] = {"learning_rate": rate}
        if not (facts.lora or own.get("lora") or own.get("tensor_parallel")):  # which leave no choice of weights
            args |= self._parsed.critic_keys
        if given != 1:
            args |= shares(self._layout.cpus, self._layout.critic)
            args |= {"env_vars": self._environment} if self._environment else {}
        return args

    def _learner(self, model: str, field: str, ranks: int) -> dict[str, Any]:
        """The keys of policy and critic alike, but for their places and rates."""
        args: dict[str, Any] = {"model": model, "dtype": self._dtype}
        args |= {"ranks": ranks} if ranks != 1 else {}
        # bfloat16 needs float32 weights in the optimizer, which ZeRO 1 keeps; several ranks divide all of them.
        args |= {"zero_stage": 3} if ranks != 1 else {"zero_stage": 1} if self._dtype == "bfloat16" else {}
        args |= {"gradient_checkpointing": "auto"} if self._gpus else {}
        args |= {"packing": self._packing(model, field), "micro_batch_tokens": self._most_tokens}
        return args | ({"lora": self._lora} if self._facts.lora else {})

    def _set(self, section: str, key: str, default: Any = None) -> Any:
        """A key that the file sets in a section of `orchestrator:`. Another value than a mapping is refused later."""
        given = self._facts.orchestrator.get(section)
        return given.get(key, default) if isinstance(given, Mapping) else default

    @property
    def _lora(self) -> dict[str, Any]:
        assert self._facts.lora is not None
        return self._facts.lora.model_dump(exclude_unset=True, mode="json")

    def _orchestrator(self) -> dict[str, Any]:
        facts, layout = self._facts, self._layout
        memory = {"gpu_gib": facts.machine.gpu_gib, "host_gib": facts.machine.host_gib}
        prompts = facts.prompts.model_dump(exclude_unset=True, exclude={"max_prompt_length"}, mode="json")
        section: dict[str, Any] = {"name": facts.name, "target": f"127.0.0.1:{facts.port}"}
        section |= {"services": {"reward": self._target}} if self._target else {}
        section |= {"seed": facts.seed, "steps": facts.steps, "batch_size": facts.batch_size}
        section["prompts_per_call"] = min(64, facts.batch_size)
        section |= {name: int(gib) if gib == int(gib) else gib for name, gib in memory.items() if gib is not None}
        section["data"] = prompts | {"max_prompt_length": lambda: self._prompt}
        section["sampling"] = {"max_new_tokens": lambda: self._response}
        for name, conversation in (("environment", facts.environment), ("agent", facts.agent)):
            section |= {} if conversation is None else {name: conversation.model_dump(exclude_unset=True)}
        section["algorithm"] = {"kind": facts.algorithm.kind} | self._usual() | self._algorithm
        ranks = self._set("policy", "ranks", layout.policy_ranks)
        policy = self._learner(facts.model, "model", ranks)
        policy["optimizer"] = {"learning_rate": facts.algorithm.learning_rate}
        policy |= {"num_cpus": layout.cpus} | ({"num_gpus": layout.policy} if layout.policy else {})
        # Of a long split the first prompts will do.
        section |= {} if facts.prompts.eval_split is None else {"evaluation": {"max_prompts": 256}}
        section["policy"] = policy | ({"env_vars": self._environment} if self._environment else {})
        return section

    def _usual(self) -> dict[str, Any]:
        """The algorithm's settings that other facts suggest."""
        compares_alone = self._parsed.compares and not self._parsed.penalises_rewards
        return {
            # A reward model may do it with its own mean and deviation; and a group's scores are compared with each
            # other alone.
            "normalise_scores": False if compares_alone else self._is_not_normalised,
            "old_logprobs": "rollout" if self._engine_is_exact else "learner",
            "minibatch_size": max(1, self._facts.batch_size // 4),
        }

    @property
    def _engine_is_exact(self) -> bool:
        """True if the engine's log-probs may stand for the learner's, which cost a pass: in float32, where they are
        equal but for rounding, unless the samples are to be corrected."""
        corrected = {"correction", "importance_cap", "importance_band"} & self._algorithm.keys()
        stale = self._set("loop", "max_staleness")
        return self._dtype == "float32" and not corrected and not stale

    def _is_not_normalised(self) -> bool:
        model = self._reward_model
        return model is None or not self._model_at(model, "reward").normalises


def environment_of(gpus: int, threads: int | None) -> dict[str, str]:
    """Environment of each process that computes, on a machine with so many GPUs."""
    threads = threads or (None if gpus else 1)
    if threads is None:
        return {}
    environment = {"OMP_NUM_THREADS": str(threads)}
    if threads > 1:
        environment |= IDLE_THREADS_SLEEP
    if not gpus:
        environment["TORCHDYNAMO_DISABLE"] = "1"
        # glibc would give back tensors of more than 32 MiB after each use, and the next one would have to be mapped
        # and cleared again.
        environment["MALLOC_MMAP_MAX_"] = "0"
    return environment


def shares(cpus: float, gpus: float) -> dict[str, float]:
    """A process's share of the machine, as options of Ray's."""
    return {"num_cpus": cpus} | ({"num_gpus": gpus} if gpus else {})


def merged(derived: Any, given: Any, where: str) -> Any:
    """The derived section with the given keys in it, mappings merged.

    Raises:
        ConfigError: a value stands where a mapping is derived.
    """
    if not isinstance(derived, Mapping):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: should be a mapping of fields to values, got {given!r}")
    both = dict(derived)
    for key, value in given.items():
        both[key] = merged(derived[key], value, f"{where}.{key}") if key in derived else value
    return both


def whole(
    security: Mapping[str, Any] | None,
    port: int,
    http_port: int,
    applications: Sequence[Mapping[str, Any]],
    **others: Any,
) -> dict[str, Any]:
    """The whole file of applications, each of which has the name of its service, and of other sections."""
    functions = [SERVICES[application["name"]].function for application in applications]
    file: dict[str, Any] = {} if security is None else {"security": security}
    file |= {
        "http_options": {"host": "127.0.0.1", "port": http_port},
        "grpc_options": {
            "port": port,
            "grpc_servicer_functions": [GUARD, *functions, "quartet.serving.proxy.add_health"],
        },
        "applications": applications,
        **others,
    }
    return {name: resolved(section) for name, section in file.items()}


def resolved(value: Any) -> Any:
    """The value with its functions called, in mappings and lists of its own."""
    if isinstance(value, Mapping):
        return {key: resolved(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [resolved(inner) for inner in value]
    return value() if callable(value) else value


_NAMES = (
    (r"applications\.(?:rollout|reference)\.args\.model\b", "model"),
    (r"applications\.reward\.args\.tokenizer\b", "model"),
    (r"applications\.reward\.args\.scorer(?:\.function|\.model)?\b", "reward"),
    (r"applications\.(\w+)(?:\.args|\.deployments\.[A-Z]\w+)?\b", r"services.\1"),
    (r"orchestrator\.policy\.(model|dtype)\b", r"\1"),
    (r"orchestrator\.algorithm\b", "algorithm"),
    (r"orchestrator\.data\b", "prompts"),
    (
        r"(?<![\w./])data\.(path|\w+_key|\w+_split|split_seed|chat_template|columns|max_prompt_length)\b",
        r"prompts.\1",
    ),
    (r"orchestrator\.sampling\.max_new_tokens\b", "max_new_tokens"),
    (r"orchestrator\.(gpu_gib|host_gib)\b", r"machine.\1"),
    (r"orchestrator\.(name|seed|steps|batch_size|environment|agent)\b", r"\1"),
    (r"(?m)^orchestrator: (?=batch_size\b)", ""),
    (r"(?<![\w.])grpc_options\.port\b", "port"),
    (r"(?<![\w.])http_options\.port\b", "http_port"),
)
"""Pattern of a derived key's name -> the name of the fact or override that states it."""


def stated(text: str) -> str:
    """The text, of one line or several, with the names of facts in place of those of derived keys, each line once."""
    return in_words(text, _NAMES)


def in_words(text: str, names: Sequence[tuple[str, str]]) -> str:
    """The text with other names for keys, each line once; `names` has pattern and name of each."""
    for pattern, name in names:
        text = re.sub(pattern, name, text)
    return "\n".join(dict.fromkeys(text.splitlines()))
