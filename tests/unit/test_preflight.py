"""What `quartet check` and `quartet train` find wrong before anything is started."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import yaml

from orchestrator.deployment import Deployment
from orchestrator.preflight import Inputs, preflight
from services.common.config import ConfigError
from tests.models import MAX_LENGTH

ROOT = Path(__file__).parents[2]
SUM = "orchestrator.data.max_prompt_length + orchestrator.sampling.max_new_tokens"
Change = Callable[[Any], Any]


@pytest.fixture
def raw(policy_folder: Path, reward_folder: Path, tmp_path: Path) -> dict[str, Any]:
    """deploy/ppo.yaml with models of 128 positions and 4 prompts, of 2 to 5 tokens."""
    for split, first in (("train", 4), ("eval", 30)):
        texts = [" ".join(f"w{first + index}" for index in range(count + 1)) for count in range(4)]
        (tmp_path / f"{split}.jsonl").write_text("".join(f'{{"prompt": "{text}"}}\n' for text in texts))
    loaded: dict[str, Any] = deepcopy(yaml.safe_load((ROOT / "deploy" / "ppo.yaml").read_text()))
    rollout, reward, reference, critic = (application["args"] for application in loaded["applications"])
    rollout["model"] = reference["model"] = reward["tokenizer"] = str(policy_folder)
    critic["model"] = reward["scorer"]["model"] = str(reward_folder)
    loaded["orchestrator"]["policy"]["model"] = str(policy_folder)
    loaded["orchestrator"]["data"]["path"] = str(tmp_path)
    loaded["orchestrator"]["evaluation"]["judges"] = {"words": "tests.scorers:count"}
    return loaded


def checked(raw: dict[str, Any], folder: Path) -> Inputs:
    path = folder / "a.yaml"
    path.write_text(yaml.safe_dump(raw))
    return preflight(Deployment.load(path, check_services=True))


def problems(raw: dict[str, Any], folder: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        checked(raw, folder)
    return str(caught.value).splitlines()


def args(raw: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(a["args"] for a in raw["applications"] if a["name"] == name)
    return found


def test_a_run_that_can_start(raw: dict[str, Any], tmp_path: Path) -> None:
    inputs = checked(raw, tmp_path)
    assert len(inputs.train.prompts) == 4
    assert inputs.held_out
    assert list(inputs.judges) == ["words"]
    assert inputs.notes == []


def test_prompts_that_are_left_out_are_told(raw: dict[str, Any], tmp_path: Path) -> None:
    # With the first token, the prompts of a split have 2, 3, 4 and 5.
    raw["orchestrator"]["data"]["max_prompt_length"] = 4
    assert checked(raw, tmp_path).notes == [
        f"1 of 4 prompts of {split} are longer than data.max_prompt_length and left out"
        for split in ("train", "eval")
    ]


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (
            lambda o: o["data"].update(prompt_split="trian"),
            ["data.path {folder}: no split 'trian'; the splits there are eval, train"],
        ),
        (
            lambda o: o["data"].update(eval_split="train[2:]"),
            [
                "data.prompt_split 'train' and data.eval_split 'train[2:]' share 2 row(s) of 'train', row 2 for one; "
                "choose ranges that do not overlap, for instance train[:90%] and train[90%:]"
            ],
        ),
        (
            lambda o: o["data"].update(prompt_split="train[4:]"),
            [
                "data split 'train[4:]': the range is rows 4 to 4 (the end not included), but the split holds 4 "
                "rows; it should start before it ends and end at 4 or before"
            ],
        ),
        (
            lambda o: o["data"].update(max_prompt_length=1),
            [
                "data.path {folder}, split 'train': no prompt left of 4: all are longer than data.max_prompt_length "
                "(1 tokens)",
                "data.path {folder}, split 'eval': no prompt left of 4: all are longer than data.max_prompt_length "
                "(1 tokens)",
            ],
        ),
        (
            lambda o: o["evaluation"].update(judges={"gold": "no.such:score", "words": "tests.scorers:none"}),
            [
                "orchestrator.evaluation.judges.gold: 'no.such:score' should be package.module:name, but cannot be "
                "imported: No module named 'no'"
            ],
        ),
        (
            lambda o: o["sampling"].update(max_new_tokens=49),
            [f"applications.rollout.args.max_length: 64, but {SUM} is 65"],
        ),
    ],
)
def test_an_orchestrator_section_that_cannot_be(
    raw: dict[str, Any], change: Change, messages: list[str], tmp_path: Path
) -> None:
    change(raw["orchestrator"])
    assert problems(raw, tmp_path) == [message.format(folder=tmp_path) for message in messages]


def test_an_empty_split_is_named(raw: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text("")
    assert problems(raw, tmp_path) == [f"data.path {tmp_path}, split 'eval': holds no rows"]


def test_data_that_is_no_text_is_named(raw: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    assert problems(raw, tmp_path) == [
        f"data.path {tmp_path / 'eval.jsonl'}: should be text in UTF-8, but byte 12 is none"
    ]


def test_no_held_out_prompts_are_read_when_evaluation_is_off(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["orchestrator"]["evaluation"]["every"] = 0
    raw["orchestrator"]["data"]["eval_split"] = "none"
    assert checked(raw, tmp_path).held_out is None


def test_precision_and_transport_must_be_the_same_on_both_sides(raw: dict[str, Any], tmp_path: Path) -> None:
    args(raw, "rollout").update(dtype="bfloat16", weight_backend="gloo")
    raw["orchestrator"]["weights"]["backend"] = "nccl"
    assert problems(raw, tmp_path) == [
        "applications.rollout.args.dtype: bfloat16, but orchestrator.policy.dtype is float32; weights are pushed as "
        "they are, so both must be the same",
        "orchestrator.weights.backend: nccl, but applications.rollout.args.weight_backend is gloo; set both the "
        "same, or one to auto",
    ]
    args(raw, "rollout").update(dtype="float32", weight_backend="auto")
    checked(raw, tmp_path)


def test_lengths_must_fit_every_service_and_model(
    raw: dict[str, Any], policy_folder: Path, reward_folder: Path, tmp_path: Path
) -> None:
    # 16 for the prompt and 113 for the response, one more than the models take.
    raw["orchestrator"]["sampling"]["max_new_tokens"] = 113
    args(raw, "rollout")["max_length"] = 129
    args(raw, "reward")["max_length"] = 128
    too_long = f"takes {MAX_LENGTH} tokens (its max_position_embeddings)"
    assert problems(raw, tmp_path) == [
        f"applications.rollout.args.max_length: 129, but {policy_folder} {too_long}",
        f"applications.reward.args.max_length: 128, but {SUM} is 129",
        *(
            f"{field}: {path} {too_long}, but {SUM} is 129"
            for field, path in (
                ("orchestrator.policy.model", policy_folder),
                ("applications.rollout.args.model", policy_folder),
                ("applications.reward.args.scorer.model", reward_folder),
                ("applications.reference.args.model", policy_folder),
                ("applications.critic.args.model", reward_folder),
            )
        ),
    ]
    raw["orchestrator"]["sampling"]["max_new_tokens"] = 112
    args(raw, "rollout")["max_length"] = 128
    checked(raw, tmp_path)


def test_a_reward_function_must_be_one(raw: dict[str, Any], tmp_path: Path) -> None:
    function = {"kind": "function", "function": "tests.scorers:count"}
    parts = [{"weight": 1.0, "scorer": function}, {"weight": 1.0, "scorer": function | {"function": "math:no"}}]
    args(raw, "reward")["scorer"] = {"kind": "blend", "parts": parts}
    (line,) = problems(raw, tmp_path)
    field = "applications.reward.args.scorer.parts.1.scorer.function"
    assert line.startswith(f"{field}: 'math:no' should be package.module:name, but cannot be imported: ")
    # Where the service has an environment of its own, it is for the service to say.
    raw["applications"][1]["runtime_env"] = {"working_dir": "https://host/code.zip"}
    checked(raw, tmp_path)


def test_a_judge_whose_module_fails_is_named(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_judge.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    raw["orchestrator"]["evaluation"]["judges"] = {"gold": "broken_judge:score"}
    assert problems(raw, tmp_path) == [
        "orchestrator.evaluation.judges.gold: importing broken_judge fails with ZeroDivisionError: division by zero"
    ]


def test_another_tokenizer_is_named_and_all_problems_are_told_at_once(
    raw: dict[str, Any], policy_folder: Path, tmp_path: Path
) -> None:
    other = copytree(policy_folder, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["w4"], vocabulary["w5"] = vocabulary["w5"], vocabulary["w4"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    args(raw, "reward")["tokenizer"] = str(other)
    args(raw, "rollout")["dtype"] = "bfloat16"
    raw["orchestrator"]["data"]["path"] = "/no/such/prompts"
    starts = [
        "applications.rollout.args.dtype: bfloat16, but ",
        f"applications.reward.args.tokenizer: the tokenizer of {other} is not that of orchestrator.policy.model "
        f"({policy_folder}), so its token ids mean something else",
        "data.path: no such file or folder: /no/such/prompts",
    ]
    said = problems(raw, tmp_path)
    assert len(said) == len(starts)
    assert all(line.startswith(start) for line, start in zip(said, starts, strict=True))


def test_services_on_another_machine_are_left_to_what_they_say(raw: dict[str, Any], tmp_path: Path) -> None:
    args(raw, "rollout").update(model="/on/another/machine", dtype="bfloat16")
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(raw))
    assert len(preflight(Deployment.load(path)).train.prompts) == 4
