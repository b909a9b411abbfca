"""The whole file derived from facts: each value once, checked by the functions of `quartet check`."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema

from orchestrator.commands.checks.preflight import preflight
from orchestrator.commands.up import _check_startable
from orchestrator.deployment.applications import SERVICES
from orchestrator.deployment.facts.derive import Layout, derive
from orchestrator.deployment.facts.facts import APPLICATION_KEYS, DEPLOYMENT_KEYS, Facts
from orchestrator.deployment.facts.read import derived
from orchestrator.deployment.file import Deployment
from quartet.config.base import ConfigError
from tests.configuration import REPO
from tests.lint.configuration import INTRODUCTION
from tests.unit.preflights import application, args


@dataclass(frozen=True, slots=True)
class Shape:
    """A model of given sizes."""

    longest: int = 4096
    vocabulary: int = 150_000
    packs: bool = True
    normalises: bool = False

    def cached(self, dtype: str) -> int:
        """Bytes of a token's keys and values."""
        return 12_288 if dtype == "bfloat16" else 24_576


@pytest.fixture
def facts(policy_folder: Path, reward_folder: Path, tmp_path: Path) -> dict[str, Any]:
    """The five facts that a run needs."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{index}"}) + "\n" for index in range(4, 12)))
    algorithm = {"kind": "ppo", "learning_rate": 1e-4}
    folders = {"model": str(policy_folder), "reward": str(reward_folder), "prompts": str(prompts)}
    return {"name": "mine"} | folders | {"algorithm": algorithm}


def loaded(facts: dict[str, Any], folder: Path) -> Deployment:
    """The deployment of a file of facts."""
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(facts))
    return Deployment.load(path, check_services=True)


def whole(facts: dict[str, Any], shape: Shape = Shape()) -> dict[str, Any]:
    """The whole file for models of a shape."""
    model: Any = shape
    return derive(Facts.of(facts), lambda folder, field: model)


def options(raw: dict[str, Any], name: str) -> dict[str, Any]:
    actual: dict[str, Any] = application(raw, name)["deployments"][0]
    return actual


def complaints(facts: dict[str, Any], folder: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(facts, folder)
    return str(caught.value).splitlines()


def test_errors_of_services_are_in_the_order_of_the_file(facts: dict[str, Any]) -> None:
    names = ["critic", "rollouts", "reward", "rollout", "reference"]
    with pytest.raises(ConfigError) as caught:
        Facts.of(facts | {"services": {name: {"kv": 1} for name in names}})
    assert [line.split(":")[0].split(".")[1] for line in str(caught.value).splitlines()] == names


def test_what_is_required_is_enough(facts: dict[str, Any], tmp_path: Path) -> None:
    deployment = loaded(facts, tmp_path)
    inputs = preflight(deployment)
    assert deployment.facts
    assert len(inputs.train.prompts) == 8
    assert deployment.applications == ("rollout", "reward", "reference", "critic")
    run = deployment.orchestrator
    # The models take 128 tokens; the reward model has its own mean and deviation.
    assert (run.data.max_prompt_length, run.sampling.max_new_tokens) == (64, 64)
    assert run.algorithm.normalise_scores is False
    assert args(deployment.raw, "critic")["optimizer"]["learning_rate"] == pytest.approx(5e-4)
    assert args(deployment.raw, "critic")["model"] == facts["reward"]
    assert (run.policy.dtype, run.algorithm.old_logprobs) == ("float32", "rollout")


def test_an_environment_is_one_fact_and_all_lengths_have_room_for_its_conversations(
    facts: dict[str, Any], tmp_path: Path
) -> None:
    """The models take 128 tokens: half of them are two responses and an answer, the rest a prompt."""
    deployment = loaded(facts | {"environment": "examples.second_try:SecondTry"}, tmp_path)
    inputs = preflight(deployment)
    assert inputs.environment is not None
    run = deployment.orchestrator
    assert run.environment is not None
    assert run.environment.kind == inputs.environment.name == "examples.second_try:SecondTry"
    assert (run.sampling.max_new_tokens, run.longest_response) == (21, 63)
    assert run.longest_sequence[0] == 128 == args(deployment.raw, "rollout")["max_length"]
    bounds = {"kind": "examples.second_try:SecondTry", "max_turns": 3, "max_tokens": 50}
    deployment = loaded(facts | {"environment": bounds, "max_new_tokens": 10}, tmp_path)
    run = deployment.orchestrator
    assert (run.data.max_prompt_length, run.longest_response) == (78, 50)
    assert run.environment is not None
    assert run.environment.max_turns == 3
    # With a limit on the conversation, two responses and an answer have to fit at least.
    for max_tokens, response in ((50, 24), (3, 1), (100, 49)):
        deployment = loaded(facts | {"environment": bounds | {"max_tokens": max_tokens}}, tmp_path)
        assert deployment.orchestrator.sampling.max_new_tokens == response
        assert deployment.orchestrator.longest_response == max_tokens


def test_an_agent_is_one_fact_and_all_lengths_have_room_for_its_conversations(
    facts: dict[str, Any], tmp_path: Path
) -> None:
    opened = facts | {"security": {"http": True}}
    deployment = loaded(opened | {"agent": "examples.agent:solve"}, tmp_path)
    inputs, run = preflight(deployment), deployment.orchestrator
    assert inputs.agent is not None
    assert run.agent is not None
    assert run.agent.kind == inputs.agent.name == "examples.agent:solve"
    # Of 128 tokens that the models take, 7 parts of a conversation have half.
    assert (run.sampling.max_new_tokens, run.longest_response) == (9, 63)
    assert run.longest_sequence[0] == 128 == args(deployment.raw, "rollout")["max_length"]
    bounds = {"kind": "examples.agent:solve", "max_tokens": 50}
    run = loaded(opened | {"agent": bounds, "max_new_tokens": 10}, tmp_path).orchestrator
    assert (run.data.max_prompt_length, run.longest_response) == (78, 50)
    with pytest.raises(ConfigError, match=r"^security.http: should be true"):
        preflight(loaded(facts | {"agent": bounds}, tmp_path))


def test_the_facts_of_the_page_give_the_agent_for_openenv_what_it_needs(
    facts: dict[str, Any], tmp_path: Path
) -> None:
    page = (REPO / "docs/extend.md").read_text()
    [block] = re.findall(r"^```yaml\n([^`]*openenv_tools[^`]*)^```$", page, re.MULTILINE)
    stated = yaml.safe_load(block)
    tasks = tmp_path / stated["prompts"]["path"]
    tasks.write_text('{"prompt": "w4", "reset": {"wanted": 7}}\n{"prompt": "w5", "reset": {"task": 3}}\n' * 4)
    deployment = loaded(facts | stated | {"prompts": stated["prompts"] | {"path": str(tasks)}}, tmp_path)
    inputs = preflight(deployment)
    assert inputs.agent is not None
    assert inputs.agent.name == "examples.openenv_tools:play"
    assert deployment.orchestrator.agent is not None
    assert deployment.orchestrator.agent.at_once == 16
    assert args(deployment.raw, "rollout")["tool_parser"] == "hermes"
    assert args(deployment.raw, "reward")["scorer"] == {"kind": "column", "missing": 0}
    assert [each.columns for each in inputs.train.prompts][:2] == [{"reset": {"wanted": 7}}, {"reset": {"task": 3}}]


def test_what_is_wrong_with_an_environment_is_told_by_its_fact(facts: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^environment.kind: 'no_such_file:Thing' should be package.module:name"):
        preflight(loaded(facts | {"environment": "no_such_file:Thing"}, tmp_path))
    [line] = complaints(facts | {"environment": {"kind": "a:B", "max_tokens": 30}, "max_new_tokens": 15}, tmp_path)
    assert "environment.max_tokens (30) must be more than twice" in line
    stated = complaints(facts | {"orchestrator": {"environment": {"kind": "a:B"}}}, tmp_path)
    assert "orchestrator.environment: is stated by environment; set that, and leave this out" in stated


@pytest.mark.parametrize("gpus", [0, 1, 2, 3, 4, 8])
def test_every_number_of_gpus_has_a_file_that_is_fine(facts: dict[str, Any], tmp_path: Path, gpus: int) -> None:
    deployment = loaded(facts | {"machine": {"gpus": gpus, "gpu_gib": 79, "host_gib": 500}}, tmp_path)
    preflight(deployment)
    raw, run, layout = deployment.raw, deployment.orchestrator, Layout.of(gpus)
    shares = [options(raw, name)["ray_actor_options"].get("num_gpus", 0) for name in SERVICES]
    replicas = options(raw, "rollout")["autoscaling_config"]["max_replicas"]
    critic = args(raw, "critic")
    asked = shares[0] * replicas + sum(shares[1:]) + run.policy.num_gpus * run.policy.ranks
    asked += critic.get("num_gpus", 0) * critic.get("ranks", 1)
    assert asked <= gpus
    assert replicas == (gpus // 2 if gpus > 1 else 1) == layout.replicas
    assert {args(raw, name)["dtype"] for name in ("rollout", "reference", "critic")} == {run.policy.dtype}
    assert run.policy.dtype == ("bfloat16" if gpus else "float32")
    assert args(raw, "reward")["scorer"]["dtype"] == run.policy.dtype
    assert ("kv_cache_mib" in args(raw, "rollout")) == (gpus < 2)


def test_a_model_is_asked_about_only_where_a_value_depends_on_it(facts: dict[str, Any]) -> None:
    settled = facts | {
        "prompts": {"path": facts["prompts"], "max_prompt_length": 16},
        "max_new_tokens": 8,
        "packing": False,
        "batch_tokens": 4096,
        "algorithm": facts["algorithm"] | {"normalise_scores": False},
        "services": {"rollout": {"kv_cache_mib": 64}},
    }

    def never(folder: str, field: str) -> Any:
        raise AssertionError(field)

    raw = derive(Facts.of(settled), never)
    assert args(raw, "rollout")["max_length"] == 24
    del settled["packing"]
    with pytest.raises(AssertionError):
        derive(Facts.of(settled), never)


def test_the_page_names_every_key_that_no_fact_states(facts: dict[str, Any]) -> None:
    [table] = re.findall(r"^\| derived key .*\n\|---.*\n((?:\|.*\n)+)", INTRODUCTION, re.MULTILINE)
    cells = (line.split(" | ")[0] for line in table.splitlines())
    named = {name.split(".")[-1] for cell in cells for name in re.findall("`([^`]+)`", cell)}
    facts["prompts"] = {"path": facts["prompts"], "eval_split": "eval"}
    derived = {"num_replicas"}  # an option of Serve's, which stands among these
    for gpus in (0, 1, 8):
        raw = whole(facts | {"machine": {"gpus": gpus}})
        for section in (raw["orchestrator"], *(args(raw, name) for name in SERVICES)):
            derived |= set(keys(section))
    stated = {"name", "target", "seed", "steps", "batch_size", "path", "eval_split", "kind", "model", "tokenizer"}
    stated |= {"max_prompt_length", "max_new_tokens", "dtype", "packing", "learning_rate"}
    assert derived - stated == named


def keys(section: dict[str, Any]) -> Iterator[str]:
    """The keys that hold a value, or the environment of a process."""
    for key, value in section.items():
        if isinstance(value, dict) and key != "env_vars":
            yield from keys(value)
        else:
            yield key


def test_memory_decides_on_passes_and_the_cache(facts: dict[str, Any]) -> None:
    # A pass's logits, their gradient and log-probs in a sixteenth: 24 GiB / 16 / (12 x 150,000) = 894 tokens.
    small = whole(facts | {"machine": {"host_gib": 24}})
    assert small["orchestrator"]["policy"]["micro_batch_tokens"] == 1024
    large = whole(facts | {"machine": {"host_gib": 512}})
    assert large["orchestrator"]["policy"]["micro_batch_tokens"] == 16_384
    assert args(large, "reference")["batch_tokens"] == args(large, "reward")["scorer"]["batch_tokens"] == 2048
    # 128 x (1024 + 256 + 128) x 24 KiB, of which an eighth of the memory is less.
    assert args(small, "rollout")["kv_cache_mib"] == 3072
    assert args(large, "rollout")["kv_cache_mib"] == 128 * (1024 + 256 + 128) * 24_576 >> 20


def test_rewards_of_every_kind(facts: dict[str, Any], tmp_path: Path) -> None:
    function = loaded(facts | {"reward": "tests.scorers:count"}, tmp_path)
    preflight(function)
    assert args(function.raw, "reward")["scorer"] == {"kind": "function", "function": "tests.scorers:count"}
    assert args(function.raw, "critic")["model"] == facts["model"]
    assert function.orchestrator.algorithm.normalise_scores is True
    # A group's scores are compared with each other alone, unless a penalty is added to them.
    groups = facts | {"reward": "tests.scorers:count"}
    for algorithm, normalised in (({"kind": "grpo"}, False), ({"kind": "rloo"}, True)):
        given = groups | {"algorithm": facts["algorithm"] | algorithm}
        assert loaded(given, tmp_path).orchestrator.algorithm.normalise_scores is normalised
    for address in ("10.0.0.7:19000", "grpc://10.0.0.7:19000", "10.0.0.7:19000/", "grpc://10.0.0.7:19000/taste"):
        elsewhere = loaded(facts | {"reward": address}, tmp_path)
        preflight(elsewhere)
        assert elsewhere.applications == ("rollout", "reference", "critic")
        used = elsewhere.orchestrator.services.reward
        assert (used.target, used.scorer) == ("10.0.0.7:19000", "taste" if address.endswith("taste") else "")
    scorers = {"words": {"kind": "function", "function": "tests.scorers:count"}}
    weighed = {"algorithm": facts["algorithm"] | {"rewards": {"words": {"weight": 0.5}}}}
    several = loaded(facts | weighed | {"reward": {"kind": "several", "scorers": scorers}}, tmp_path)
    assert args(several.raw, "reward")["scorer"]["scorers"] == scorers
    preflight(several)
    # A judge's model is a name at its endpoint, even one that looks like a model of a hub.
    judge = {"kind": "judge", "url": "https://host/v1", "model": "org/name@v1", "rubric": "Is it polite?"}
    judged = loaded(facts | {"reward": judge}, tmp_path)
    assert args(judged.raw, "reward")["scorer"] == judge
    assert args(judged.raw, "critic")["model"] == facts["model"]
    assert judged.orchestrator.algorithm.normalise_scores is True
    preflight(judged)
    weighed = {"algorithm": facts["algorithm"] | {"rewards": {"polite": {"weight": 1}}}}
    within = loaded(facts | weighed | {"reward": {"kind": "several", "scorers": {"polite": judge}}}, tmp_path)
    assert args(within.raw, "reward")["scorer"]["scorers"] == {"polite": judge}


def test_algorithms_start_what_they_need(facts: dict[str, Any], tmp_path: Path) -> None:
    rloo = loaded(facts | {"algorithm": {"kind": "rloo", "learning_rate": 1e-4, "kl": {"coef": 0.0}}}, tmp_path)
    preflight(rloo)
    assert rloo.applications == ("rollout", "reward")
    plain = loaded(facts | {"algorithm": {"kind": "reinforce++", "learning_rate": 1e-4}}, tmp_path)
    assert plain.applications == ("rollout", "reward", "reference")
    corrected = facts["algorithm"] | {"correction": "icepop"}
    assert loaded(facts | {"algorithm": corrected}, tmp_path).orchestrator.algorithm.old_logprobs == "learner"
    ahead = loaded(facts | {"orchestrator": {"loop": {"max_staleness": 2}}}, tmp_path)
    assert ahead.orchestrator.algorithm.old_logprobs == "learner"


def test_a_kind_fills_in_its_keys_of_the_critic(facts: dict[str, Any], tmp_path: Path) -> None:
    sao = facts | {"algorithm": {"kind": "sao", "learning_rate": 1e-4}}
    frozen = loaded(sao, tmp_path)
    assert args(frozen.raw, "critic")["freeze_attention"] is True

    def told(run: Deployment) -> list[str]:
        return [run.worded(note).partition(",")[0] for note in preflight(run).notes if "freeze_attention" in note]

    assert told(frozen) == []
    other = loaded(sao | {"services": {"critic": {"freeze_attention": False}}}, tmp_path)
    assert told(other) == ["services.critic.freeze_attention: false"]
    for given in ({"lora": {"rank": 2}}, {"services": {"critic": {"ranks": 2, "tensor_parallel": {"size": 2}}}}):
        assert "freeze_attention" not in args(loaded(sao | given, tmp_path).raw, "critic")
    assert "freeze_attention" not in args(loaded(facts, tmp_path).raw, "critic")


def test_overrides_are_merged_into_what_is_derived(facts: dict[str, Any]) -> None:
    services = {
        "rollout": {"num_replicas": 2, "max_num_seqs": 7, "ray_actor_options": {"memory": 5}},
        "reward": {"scorer": {"offload": True}, "runtime_env": {"env_vars": {"X": "y"}}},
        "critic": {"ranks": 2, "num_cpus": 3, "optimizer": {"warmup_steps": 4}},
    }
    run = {"policy": {"optimizer": {"weight_decay": 0.1}}, "weights": {"timeout_s": 30}}
    raw = whole(facts | {"services": services, "orchestrator": run, "lora": {"rank": 8}})
    rollout = options(raw, "rollout")
    assert rollout["autoscaling_config"] == {"min_replicas": 2, "max_replicas": 2}
    assert rollout["ray_actor_options"] == {"num_cpus": 0.2, "memory": 5}
    assert args(raw, "rollout")["max_num_seqs"] == 7
    assert args(raw, "reward")["scorer"] == {
        **{"kind": "model", "model": facts["reward"], "dtype": "float32"},
        **{"batch_tokens": 1024, "packing": True, "offload": True},
    }
    reward = next(a for a in raw["applications"] if a["name"] == "reward")
    assert reward["runtime_env"]["env_vars"] | {"X": "y", "OMP_NUM_THREADS": "1"} == reward["runtime_env"]["env_vars"]
    critic = args(raw, "critic")
    assert (critic["ranks"], critic["num_cpus"], critic["zero_stage"]) == (2, 3, 3)
    assert critic["optimizer"] == {"learning_rate": pytest.approx(5e-4), "warmup_steps": 4}
    assert critic["lora"] == raw["orchestrator"]["policy"]["lora"] == {"rank": 8}
    assert raw["orchestrator"]["policy"]["optimizer"] == {"learning_rate": 1e-4, "weight_decay": 0.1}
    assert raw["orchestrator"]["weights"] == {"timeout_s": 30}


def test_the_engine_gets_the_adapters_that_a_run_pushes_alone(facts: dict[str, Any], tmp_path: Path) -> None:
    given = facts | {"lora": {"rank": 8}, "orchestrator": {"weights": {"adapters": True}}}
    assert args(loaded(given, tmp_path).raw, "rollout")["adapters"] == {"rank": 8}
    assert "adapters" not in args(whole(facts | {"lora": {"rank": 8}}), "rollout")
    given["orchestrator"] |= {"weights": {"adapters": True, "in_flight": "finish"}, "loop": {"max_staleness": 2}}
    assert args(loaded(given, tmp_path).raw, "rollout")["adapter_versions"] == 3


@pytest.mark.parametrize("section", ["weights", "policy", "loop"])
def test_a_section_that_is_none_is_named(facts: dict[str, Any], tmp_path: Path, section: str) -> None:
    with pytest.raises(ConfigError, match=rf"^orchestrator\.{section}: should be a mapping of fields to values, got"):
        loaded(facts | {"lora": {"rank": 8}, "orchestrator": {section: 5}}, tmp_path)


def test_the_guard_is_first_whatever_is_deployed(facts: dict[str, Any]) -> None:
    for reward in (facts["reward"], "10.0.0.7:19000"):
        raw = whole(facts | {"reward": reward, "port": 19500, "http_port": 18500})
        functions = raw["grpc_options"]["grpc_servicer_functions"]
        assert functions[0] == "quartet.serving.proxy.end_with_caller"
        assert len(functions) == 2 + len(raw["applications"])
        assert (raw["grpc_options"]["port"], raw["http_options"]) == (19500, {"host": "127.0.0.1", "port": 18500})
        assert raw["orchestrator"]["target"] == "127.0.0.1:19500"


def test_options_of_serve_are_those_of_its_schema() -> None:
    assert set(DeploymentSchema.model_fields) - {"name"} == DEPLOYMENT_KEYS
    assert set(ServeApplicationSchema.model_fields) > APPLICATION_KEYS
    for service in SERVICES.values():
        assert not (DEPLOYMENT_KEYS | APPLICATION_KEYS) & set(service.config.model_fields)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"modell": "x"}, "modell: unknown field; known: "),
        ({"steps": "many"}, "steps: should be a whole number, got 'many'"),
        ({"seed": True}, "seed: should be a whole number, got true"),
        ({"prompts": 3}, "prompts: should be a mapping of fields to values, got 3"),
        ({"prompts": {"path": "p", "inputkey": "x"}}, "prompts.inputkey: unknown field; known: "),
        ({"reward": 3}, "reward: should be text, got 3"),
        ({"reward": {"kind": "oracle"}}, "reward.kind: should be one of "),
        ({"algorithm": {"kind": "ppo"}}, "algorithm.learning_rate: required"),
        ({"algorithm": {"kind": "grow", "learning_rate": 1.0}}, "algorithm.kind: should be one of 'ppo', 'rloo', "),
        ({"algorithm": {"kind": "ppo", "learning_rate": 1.0, "klc": 1}}, "algorithm.klc: unknown field; known: "),
        (
            {"algorithm": {"kind": "ppo", "learning_rate": 1.0, "kl": {"coef": "x"}}},
            "algorithm.kl.coef: should be a number, got 'x'",
        ),
        ({"machine": {"gpus": -1}}, "machine.gpus: should be 0 or more, got -1"),
        ({"services": {"rolout": {}}}, "services.rolout: unknown service; known: "),
        ({"services": {"rollout": {"kv": 1}}}, "services.rollout.kv: unknown field; known: "),
        ({"services": {"critic": {"optimizer": {"lr": 1}}}}, "services.critic.optimizer.lr: unknown field; known: "),
        ({"services": {"rollout": {"max_num_seqs": "x"}}}, "services.rollout.max_num_seqs: should be a whole number"),
        ({"services": {"rollout": {"num_replicas": 0}}}, "services.rollout.num_replicas: should be 1 or more, got 0"),
        ({"services": {"critic": {"num_replicas": 2}}}, "services.critic.num_replicas: should be 1, got 2"),
        (
            {"services": {"rollout": {"ray_actor_options": 1}}},
            "services.rollout.ray_actor_options: should be a mapping of fields to values, got 1",
        ),
        ({"orchestrator": {"looop": {}}}, "orchestrator.looop: unknown field; known: "),
        ({"orchestrator": {"loop": {"dept": 1}}}, "orchestrator.loop.dept: unknown field; known: "),
        ({"orchestrator": {"steps": 3}}, "orchestrator.steps: is stated by steps; set that, and leave this out"),
        (
            {"orchestrator": {"algorithm": {"epochs": 1}}},
            "orchestrator.algorithm: is stated by algorithm; set that, ",
        ),
        ({"orchestrator": {"policy": {"dtype": "float32"}}}, "orchestrator.policy.dtype: is stated by dtype; "),
        ({"model": "no/such"}, "model: should be a model's folder, but no/such does not exist"),
        ({"model": __file__}, f"model: should be a model's folder, but {__file__} is a file"),
        ({"model": "../../x@main"}, "model: should be a folder or ORG/NAME@REVISION, got '../../x@main'"),
        ({"port": 0}, "port: should be 1 or more, got 0"),
        ({"port": 18000}, "http_port and port: should differ, got 18000, 18000"),
        ({"security": {"hots": "x"}}, "security.hots: unknown field; known: "),
    ],
)
def test_wrong_facts_are_named(facts: dict[str, Any], change: dict[str, Any], says: str, tmp_path: Path) -> None:
    lines = complaints(facts | change, tmp_path)
    assert [line for line in lines if line.removeprefix(f"{tmp_path / 'mine.yaml'}: ").startswith(says)], lines


def test_a_service_that_the_run_does_not_start_has_no_overrides(facts: dict[str, Any], tmp_path: Path) -> None:
    rloo = facts | {"algorithm": {"kind": "rloo", "learning_rate": 1e-4}, "services": {"critic": {"seed": 1}}}
    assert complaints(rloo, tmp_path) == [
        "services.critic: this run starts none (the algorithm needs none); leave it out"
    ]


def test_facts_of_a_critic_are_for_an_algorithm_that_trains_one(facts: dict[str, Any], tmp_path: Path) -> None:
    of_critic = {"critic": "no/such", "services": {"critic": {"seed": 1}}}
    for algorithm in ({"kind": "grpo"}, {"kind": "ppo", "baseline": "batch"}):
        given = {"learning_rate": 1e-4, "critic_learning_rate": 1e-3} | algorithm
        assert [
            line.partition(":")[0] for line in complaints(facts | of_critic | {"algorithm": given}, tmp_path)
        ] == [*("services.critic", "critic", "algorithm.critic_learning_rate")]
        whole(facts | {"algorithm": algorithm | {"learning_rate": 1e-4}})
    with_critic = facts | {
        "critic": facts["reward"],
        "algorithm": facts["algorithm"] | {"critic_learning_rate": 1e-3},
    }
    assert args(loaded(with_critic, tmp_path).raw, "critic")["optimizer"] == {"learning_rate": 1e-3}


def test_a_fact_that_an_override_would_leave_without_effect_is_refused(facts: dict[str, Any], tmp_path: Path) -> None:
    overrides = {"model": facts["model"], "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2}}
    given = facts | {"services": {"critic": overrides}}
    assert args(loaded(given, tmp_path).raw, "critic")["optimizer"] == overrides["optimizer"]
    given |= {"critic": facts["reward"], "algorithm": facts["algorithm"] | {"critic_learning_rate": 1e-2}}
    assert complaints(given, tmp_path) == [
        "services.critic.model: is stated by critic; leave one of them out",
        "services.critic.optimizer.learning_rate: is stated by algorithm.critic_learning_rate; leave one of them out",
    ]


def test_a_missing_folder_is_told_once_in_the_words_of_the_facts(facts: dict[str, Any], tmp_path: Path) -> None:
    settled = facts | {
        "prompts": {"path": facts["prompts"], "max_prompt_length": 8},
        **{"max_new_tokens": 8, "packing": False, "batch_tokens": 4096, "model": "gone"},
        "services": {"rollout": {"kv_cache_mib": 64}},
    }
    lines = complaints(settled, tmp_path)
    assert [line.partition(":")[0] for line in lines] == ["model"]


def test_checks_speak_of_facts(facts: dict[str, Any], tmp_path: Path) -> None:
    deployment = loaded(facts | {"max_new_tokens": 100, "machine": {"host_gib": 0.001}}, tmp_path)
    with pytest.raises(ConfigError) as caught:
        preflight(deployment)
    text = str(caught.value)
    assert "machine.host_gib: one host may have to hold" in text
    assert "prompts.max_prompt_length + max_new_tokens" not in text  # 28 + 100 fit the models' 128


SECOND_TRY = {"kind": "examples.second_try:SecondTry"}


@pytest.mark.parametrize(
    ("change", "facts_named", "length"),
    [
        ({"max_new_tokens": 128}, "max_new_tokens", 129),
        ({"prompts": {"max_prompt_length": 65}}, "prompts.max_prompt_length", 129),
        ({"environment": SECOND_TRY, "max_new_tokens": 60}, "max_new_tokens", 181),
        ({"environment": SECOND_TRY | {"max_tokens": 500}, "max_new_tokens": 9}, "environment.max_tokens", 501),
        (
            {"agent": {"kind": "examples.agent:solve", "max_tokens": 90}, "prompts": {"max_prompt_length": 70}},
            *("prompts.max_prompt_length and agent.max_tokens", 160),
        ),
    ],
)
def test_lengths_beyond_the_models_are_told_once(
    facts: dict[str, Any], change: dict[str, Any], facts_named: str, length: int, tmp_path: Path
) -> None:
    given = facts | change | {"prompts": {"path": facts["prompts"]} | change.get("prompts", {})}
    [line] = complaints(given, tmp_path)
    assert line.startswith(f"{facts_named}: sequences would have {length} tokens, ")
    assert f"but model ({facts['model']}) takes 128; give less" in line


def test_lengths_that_are_both_given_are_compared_with_all_models_in_one_line(
    facts: dict[str, Any], tmp_path: Path
) -> None:
    given = facts | {"prompts": {"path": facts["prompts"], "max_prompt_length": 64}, "max_new_tokens": 65}
    with pytest.raises(ConfigError) as caught:
        preflight(loaded(given, tmp_path))
    assert str(caught.value).splitlines() == [
        f"prompts.max_prompt_length + max_new_tokens is 129 tokens, but model ({facts['model']}) takes 128, "
        f"reward ({facts['reward']}) takes 128 (max_position_embeddings)"
    ]
    file = loaded(given, tmp_path)
    with pytest.raises(ConfigError) as caught:
        _check_startable(file)  # as `quartet up` does
    assert file.worded(str(caught.value)) == (
        f"services.rollout.max_length: 129, but {facts['model']} takes 128 tokens (its max_position_embeddings)"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompts": {"path": "none.jsonl"}}, "prompts.path: no such file or folder: none.jsonl"),
        ({"reward": "tests.scorers:none"}, "reward: 'tests.scorers:none' should be package.module:name, but cannot"),
        (
            {"algorithm": {"kind": "grpo", "learning_rate": 1e-4}, "batch_size": 9},
            "batch_size (9) must be a multiple of algorithm.samples_per_prompt (8)",
        ),
        ({"reward": "scorers"}, "reward: should be a model's folder, but scorers does not exist; or a function as "),
    ],
)
def test_what_a_fact_names_and_is_not_there_is_told_by_that_fact(
    facts: dict[str, Any], change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(facts | change))
    with pytest.raises(ConfigError) as caught:
        preflight(Deployment.load(path))
    assert [line for line in str(caught.value).splitlines() if line.startswith(says)], str(caught.value)


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        ({"name": "x"}, "should state the facts name, model, reward, prompts, algorithm, or scorers alone, or be "),
        ({}, "should state the facts "),
        ({"model": "m", "applications": []}, "model are facts, from which applications are derived"),
        ({"name": "x", "model": "m", "data": {}}, "is a file of `quartet sft` or `quartet reward-model`, by its key"),
    ],
)
def test_a_file_of_neither_kind_or_of_both_is_refused(contents: dict[str, Any], says: str, tmp_path: Path) -> None:
    [line] = complaints(contents, tmp_path)
    assert says in line


def test_anchors_may_be_shared(facts: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"shared: {{x: &x 9}}\n{yaml.safe_dump(facts)}steps: *x\n")
    assert Deployment.load(path).orchestrator.steps == 9
    assert "shared" not in derived(facts | {"shared": {}}, path)
