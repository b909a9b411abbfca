"""`quartet evaluate`: what it asks before it generates anything, and what it makes of the file."""

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import yaml
from transformers import GenerationConfig

from orchestrator.clients import Services
from orchestrator.commands.evaluate import default_output, evaluate_model, served
from orchestrator.commands.offline import OfflineRollout, rollout_config
from orchestrator.deployment.applications import env_vars
from orchestrator.deployment.file import Deployment
from protos import common_pb2, reference_pb2, reward_pb2, rollout_pb2
from quartet.config.base import ConfigError
from quartet.wire.errors import DeadlineExceeded, Internal, InvalidArgument, Unavailable
from quartet.wire.identity import tokenizer_hash
from services.rollout.offline import pack_call
from services.rollout.sample import Sampling
from tests.models import make_tokenizer

ROLLOUT = {"name": "rollout", "import_path": "services.rollout.replica:build"}


def load(folder: Path, policy: Path, applications: Any, **section: Any) -> Deployment:
    path = folder / "a.yaml"
    least = {
        "name": "run",
        "data": {"path": str(folder / "prompts.jsonl"), "prompt_split": "train[:1]", "eval_split": "train[1:]"},
        "policy": {"model": str(policy), "optimizer": {"learning_rate": 1e-4}},
    }
    path.write_text(yaml.safe_dump({"applications": applications, "orchestrator": least | section}))
    (folder / "prompts.jsonl").write_text('{"prompt": "w4"}\n{"prompt": "w5"}\n')
    return Deployment.load(path)


class FakeClient:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def info(self, timeout_s: float) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer, timeout_s

    async def reachable(self, timeout_s: float) -> bool:
        return True

    async def close(self) -> None:
        self.answer = None


class FakeInfo(FakeClient):
    async def info(self, timeout_s: float) -> Any:
        return self.answer


def make_services(rollout: Any = "rollout", reference: Any = "reference") -> Services:
    silent = FakeClient(AssertionError("asked"))
    return Services(FakeClient(rollout), FakeClient("reward"), FakeClient(reference), silent)  # type: ignore[arg-type]


async def test_all_that_take_part_are_asked_and_the_critic_is_not() -> None:
    names = {"rollout", "reward", "reference"}
    assert await make_services().infos_of(names, 3) == {name: (name, 3) for name in names}
    silent, without = make_services(rollout=AssertionError("asked")), {"reward", "reference"}
    assert await silent.infos_of(without, 3) == {name: (name, 3) for name in without}
    with pytest.raises(ExceptionGroup) as caught:
        await make_services(reference=Unavailable("reference.Info: gone")).infos_of(names, 3)
    assert [str(error) for error in caught.value.exceptions] == ["reference.Info: gone"]


@pytest.mark.parametrize(("named", "taken"), [("held_out", "held_out"), (None, "eval")])
async def test_the_split_is_the_files_unless_it_is_given(
    policy_folder: Path, tmp_path: Path, named: str | None, taken: str
) -> None:
    data = {"path": str(tmp_path / "prompts.jsonl"), "eval_split": named}
    deployment = load(tmp_path, policy_folder, [], data=data)
    with pytest.raises(ConfigError, match=f"no split '{taken}'; the splits there are train$"):
        await evaluate_model(deployment, "current", None, None, lambda config, purpose: make_services())
    with pytest.raises(ConfigError, match="no split 'other'"):
        await evaluate_model(deployment, "current", "other", None, lambda config, purpose: make_services())


def test_models_of_the_same_name_in_other_folders_have_files_of_their_own() -> None:
    models = ("current", "./current", "models/policy", "runs/run/policy", "/models/policy")
    paths = [default_output("run", model, "eval") for model in models]
    assert [paths[0].name, paths[3].name] == ["evaluate-current-eval.jsonl", "evaluate-runs_run_policy-eval.jsonl"]
    assert {path.parent for path in paths} == {Path("runs/run")}
    assert len({*paths}) == len(models)
    assert default_output("run", "current", "train[:9]").name == "evaluate-current-train__9_.jsonl"
    assert len(default_output("run", "/disk" + "/folder" * 100, "eval").name) < 255


async def test_a_place_that_could_not_take_the_samples_is_refused_at_the_start(
    policy_folder: Path, tmp_path: Path
) -> None:
    deployment = load(tmp_path, policy_folder, [])
    (tmp_path / "file").touch()
    refused = {
        f"^--output: {tmp_path} is a folder; name a file in it$": tmp_path,
        f"^--output: .* cannot be written: {tmp_path}/file is a file and should be a folder": tmp_path
        / "file"
        / "out",
    }
    for said, output in refused.items():
        with pytest.raises(ConfigError, match=said):
            # Without the port on which nothing listens being asked.
            await evaluate_model(deployment, "current", "train", output)


async def test_services_that_are_down_are_said_to_be(policy_folder: Path, tmp_path: Path) -> None:
    deployment = load(tmp_path, policy_folder, [], target="127.0.0.1:1", timeouts={"info_s": 0.5})
    with pytest.raises(Unavailable) as caught:
        await evaluate_model(deployment, "current", "train", None)
    for said in ("127.0.0.1:1 (orchestrator.target) within 0.5 s", f"quartet up {deployment.path}", "serve deploy"):
        assert said in str(caught.value)


async def test_an_end_that_min_new_tokens_could_not_mask_is_named(policy_folder: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(policy_folder, policy)
    GenerationConfig(eos_token_id=50256).save_pretrained(policy)
    deployment = load(tmp_path, policy, [], sampling={"max_new_tokens": 4, "min_new_tokens": 1})
    with pytest.raises(ConfigError, match="min_new_tokens: 1, but of the tokens that end a text 50256 is not one"):
        await evaluate_model(deployment, "current", "train", None, lambda config, purpose: make_services())


@pytest.mark.parametrize("name", ["rollout", "reward", "reference"])
async def test_a_service_with_another_tokenizer_is_named(name: str, policy_folder: Path, tmp_path: Path) -> None:
    same: dict[str, Any] = {"tokenizer_hash": tokenizer_hash(make_tokenizer()), "max_length": 4096, "vocab_size": 64}
    models = {each: common_pb2.ModelInfo(name=each, **same) for each in ("rollout", "reward", "reference")}
    models[name].tokenizer_hash = "?"
    clients = [
        FakeInfo(rollout_pb2.RolloutInfo(model=models["rollout"])),
        FakeInfo(reward_pb2.ScorerInfo(model=models["reward"])),
        FakeInfo(reference_pb2.ReferenceInfo(model=models["reference"])),
        FakeInfo(None),
    ]
    deployment = load(tmp_path, policy_folder, [])
    message = f"{name}: the tokenizer of {name} is not that of orchestrator.policy.model ({policy_folder})"
    with pytest.raises(ConfigError, match=re.escape(message)):
        await evaluate_model(deployment, "current", "train", None, lambda config, purpose: Services(*clients))  # type: ignore[arg-type]
    assert clients[1].answer is None  # the connection was closed


@pytest.mark.parametrize("applications", [None, []])
def test_another_model_needs_a_rollout_application(applications: Any, policy_folder: Path, tmp_path: Path) -> None:
    deployment = load(tmp_path, policy_folder, applications)
    message = f"{deployment.path}: applications: none has the import_path services.rollout.replica:build"
    with pytest.raises(ConfigError, match=re.escape(message)):
        OfflineRollout.of(str(policy_folder), deployment, make_tokenizer())


def test_what_is_null_in_the_rollout_section_is_left_to_its_defaults(policy_folder: Path, tmp_path: Path) -> None:
    deployment = load(tmp_path, policy_folder, [ROLLOUT | {"args": None, "runtime_env": None}])
    assert rollout_config(deployment, str(policy_folder)).model == str(policy_folder)
    OfflineRollout.of(str(policy_folder), deployment, make_tokenizer())
    for runtime_env, variables in ((None, {}), ({"env_vars": None}, {}), ({"env_vars": {"A": "1"}}, {"A": "1"})):
        assert env_vars(ROLLOUT | {"runtime_env": runtime_env}, "applications.rollout") == variables


def test_another_model_is_loaded_without_the_adapters_that_a_run_pushes(policy_folder: Path, tmp_path: Path) -> None:
    deployed = ROLLOUT | {"args": {"model": "elsewhere", "max_length": 64, "adapters": {"rank": 4}}}
    config = rollout_config(load(tmp_path, policy_folder, [deployed]), str(policy_folder))
    assert (config.max_length, config.adapters) == (64, None)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"args": [1]}, "applications.rollout.args: should be a mapping, got [1]"),
        ({"runtime_env": "x"}, "applications.rollout.runtime_env: should be a mapping, got 'x'"),
        (
            {"runtime_env": {"env_vars": ["A"]}},
            "applications.rollout.runtime_env.env_vars: should be a mapping, got ['A']",
        ),
        (
            {"runtime_env": {"env_vars": {"A": 1}}},
            "applications.rollout.runtime_env.env_vars.A: should be text, got 1; put it in quotes",
        ),
    ],
)
def test_what_is_wrong_in_the_rollout_section_is_named(
    section: dict[str, Any], message: str, policy_folder: Path, tmp_path: Path
) -> None:
    deployment = load(tmp_path, policy_folder, [ROLLOUT | section])
    with pytest.raises(ConfigError, match=re.escape(message)):
        OfflineRollout.of(str(policy_folder), deployment, make_tokenizer())


class FakeReplicas:
    def __init__(self, *looks: list[tuple[int, int]]) -> None:
        """Timeline and version of each replica at each look."""
        self._looks = list(looks)

    async def update_weights(self, timeout_s: float, **phase: Any) -> list[rollout_pb2.WeightReport]:
        [name] = phase
        assert name == "discover"  # which changes nothing
        look = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        return [
            rollout_pb2.WeightReport(
                replica=f"r{number}", ok=timeline >= 0, timeline=timeline, policy_version=version
            )
            for number, (timeline, version) in enumerate(look)
        ]


async def test_replicas_that_serve_different_weights_are_refused(policy_folder: Path, tmp_path: Path) -> None:
    config = load(tmp_path, policy_folder, []).orchestrator
    newcomer: Any = FakeReplicas([(3, 41), (0, 0)])
    with pytest.raises(ConfigError, match="r0: version 41; r1: its model's own") as caught:
        await served(newcomer, config, alike_s=0.01)
    assert "--model runs/run/policy" in str(caught.value)
    # Equal versions of two timelines are other weights.
    with pytest.raises(ConfigError, match="different weights"):
        await served(FakeReplicas([(3, 41), (2, 41)]), config, alike_s=0.01)  # type: ignore[arg-type]


async def test_a_push_that_is_under_way_and_a_dead_engine_are_waited_for_and_passed_over(
    policy_folder: Path, tmp_path: Path
) -> None:
    config = load(tmp_path, policy_folder, []).orchestrator
    assert await served(FakeReplicas([(3, 41), (3, 42)], [(3, 42), (3, 42)]), config) == 42  # type: ignore[arg-type]
    assert await served(FakeReplicas([(-1, 0), (3, 42)]), config) == 42  # type: ignore[arg-type]
    with pytest.raises(Unavailable):
        await served(FakeReplicas([(-1, 0)]), config, alike_s=0.01)  # type: ignore[arg-type]


ENGINE = """
import asyncio
from pathlib import Path

import numpy as np

from services.rollout.sample import FinishReason, Sample

FOLDER = Path(__file__).parent


class Engine:
    max_length = 16

    def __init__(self):
        self.second = asyncio.Event()

    async def generate(self, index, prompt_ids, sampling, seed):
        token = int(prompt_ids[0])
        if token == 6:
            raise ValueError("no token 6")
        if token == 7:
            await asyncio.Event().wait()
        if token == 8:
            await self.second.wait()
        if token == 9:
            self.second.set()
        length = sampling.max_new_tokens
        ids = np.asarray([token, seed, *sampling.stop_token_ids], np.int32)[:length]
        return Sample(index, ids, np.full(len(ids), -0.5, np.float32), FinishReason.STOP, ((0, 0, len(ids)),))

    def shutdown(self):
        (FOLDER / "ended").write_text("in order")


async def start(config):
    with (FOLDER / "started").open("a") as file:
        file.write(config.model + "\\n")
    print("noise of an engine")
    return Engine()
"""


def offline_rollout(folder: Path, policy: Path) -> OfflineRollout:
    """With an engine of the user's, which answers with a prompt's token, its seed and the stop tokens."""
    (folder / "engine_of_a_user.py").write_text(ENGINE)
    variables = {"env_vars": {"PYTHONPATH": str(folder)}}
    rollout = ROLLOUT | {"args": {"engine": "engine_of_a_user:start"}, "runtime_env": variables}
    return OfflineRollout.of(str(policy), load(folder, policy, [rollout]), make_tokenizer())


async def generated(offline: OfflineRollout, *tokens: int, timeout_s: float = 60, **given: Any) -> list[list[int]]:
    """Ids of the responses to prompts of one token each."""
    prompts, sampling = [np.asarray([token], np.int32) for token in tokens], Sampling(4, stop_token_ids=(5,))
    async for samples in offline.generate(prompts, sampling, timeout_s=timeout_s, **given):
        assert [sample.index for sample in samples] == list(range(len(tokens)))
        return [sample.response_ids.tolist() for sample in samples]
    raise AssertionError("it yields once")


async def test_one_offline_engine_answers_all_calls_and_draws_other_numbers_in_each(
    policy_folder: Path, tmp_path: Path
) -> None:
    offline = offline_rollout(tmp_path, policy_folder)
    async with offline.running():
        # The first call is answered only once the second has come: a later turn does not wait for an earlier one.
        first = asyncio.ensure_future(generated(offline, 8, 1, 2))
        assert await generated(offline, 9, 3, seeds=[70, 71]) == [[9, 70, 5], [3, 71, 5]]
        assert await first == [[8, 0, 5], [1, 1, 5], [2, 2, 5]]
        assert await generated(offline, 4) == [[4, 3, 5]]
    assert (tmp_path / "started").read_text() == f"{policy_folder}\n"
    assert (tmp_path / "ended").read_text() == "in order"


async def test_an_offline_engine_that_fails_is_quoted(policy_folder: Path, tmp_path: Path) -> None:
    offline = offline_rollout(tmp_path, policy_folder)
    async with offline.running():
        others = asyncio.ensure_future(generated(offline, 7))
        with pytest.raises(Internal, match=f"generating with {policy_folder} failed:[^$]*ValueError: no token 6"):
            await generated(offline, 6)
        with pytest.raises(Internal):
            await others
        with pytest.raises(Internal):
            await generated(offline, 1)


async def test_a_prompt_that_leaves_no_room_for_a_response_is_refused_alone(
    policy_folder: Path, tmp_path: Path
) -> None:
    offline = offline_rollout(tmp_path, policy_folder)
    long = [np.full(15, 9, np.int32), np.full(16, 9, np.int32)]
    async with offline.running():
        with pytest.raises(InvalidArgument, match=r"^prompts\[1\]: 16 tokens; must be fewer than 16, "):
            await anext(offline.generate(long, Sampling(4), timeout_s=60))
        assert await generated(offline, 1) == [[1, 2, 5]]


async def test_an_offline_engine_that_is_late_is_ended(policy_folder: Path, tmp_path: Path) -> None:
    offline = offline_rollout(tmp_path, policy_folder)
    async with offline.running():
        assert await generated(offline, 1) == [[1, 0, 5]]
        with pytest.raises(DeadlineExceeded, match=r"1 samples .* not done within 0.1 s \(timeouts.generate_s, or"):
            await generated(offline, 7, timeout_s=0.1)
    assert (tmp_path / "ended").read_text() == "in order"


def test_an_offline_engine_is_given_all_of_the_sampling() -> None:
    sampling = Sampling(max_new_tokens=4, min_new_tokens=1, temperature=0.5, stop_token_ids=(7, 8))
    packed = msgpack.unpackb(pack_call(0, [np.asarray([1], np.int32)], sampling, [0]))["sampling"]
    assert packed == {"max_new_tokens": 4, "min_new_tokens": 1, "temperature": 0.5, "stop_token_ids": [7, 8]}
