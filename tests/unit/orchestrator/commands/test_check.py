"""Faults that `quartet check` and `quartet train` name before anything is started."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import GenerationConfig

from orchestrator.algorithms.registry import kinds
from orchestrator.deployment.file import Deployment
from tests.families import ENDS, FAMILIES
from tests.models import EOS, WORDS, make_policy
from tests.unit.preflights import SUM, args, checked, problems

Change = Callable[[Any], Any]


def test_a_run_that_can_start(raw: dict[str, Any], tmp_path: Path) -> None:
    inputs = checked(raw, tmp_path)
    assert len(inputs.train.prompts) == 4
    assert inputs.held_out
    assert list(inputs.judges) == ["words"]
    assert inputs.notes == []


def test_without_a_kl_penalty_a_file_needs_no_reference(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["applications"] = [a for a in raw["applications"] if a["name"] != "reference"]
    assert problems(raw, tmp_path) == [
        "applications: none is named reference; a run needs none if orchestrator.algorithm.kl.coef is 0"
    ]
    raw["orchestrator"]["algorithm"]["kl"] = {"coef": 0}
    assert checked(raw, tmp_path).notes == []
    path = tmp_path / "a.yaml"
    assert Deployment.load(path).orchestrator.services.used == ("rollout", "reward", "critic")
    # One at a place of its own, or under another name, is measured.
    raw["orchestrator"]["services"] = {"reference": {"target": "127.0.0.1:19001"}}
    path.write_text(yaml.safe_dump(raw))
    assert "reference" in Deployment.load(path).orchestrator.services.used


@pytest.mark.parametrize("algorithm", [{"kind": "rloo", "samples_per_prompt": 4}, {"kind": "reinforce++"}])
def test_advantages_without_values_need_no_critic(
    raw: dict[str, Any], tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    every = raw["applications"]
    raw["applications"] = [a for a in every if a["name"] != "critic"]
    assert problems(raw, tmp_path) == [
        "applications: none is named critic; a run needs none if orchestrator.algorithm.kind is "
        f"{kinds(critic=False)}"
    ]
    raw["orchestrator"]["algorithm"] |= algorithm
    assert checked(raw, tmp_path).notes == []
    assert Deployment.load(tmp_path / "a.yaml").orchestrator.services.used == ("rollout", "reward", "reference")
    # One that is there all the same is told, and not used.
    raw["applications"] = every
    args(raw, "critic")["root"] = "elsewhere"
    assert checked(raw, tmp_path).notes == [
        "applications.critic: a critic that the run does not use, as orchestrator.algorithm.kind is "
        f"{algorithm['kind']}; leave it out to free its memory, or set algorithm.kind to ppo"
    ]
    assert Deployment.load(tmp_path / "a.yaml").orchestrator.services.used == ("rollout", "reward", "reference")


def test_what_is_sampled_from_is_read_from_the_policy(raw: dict[str, Any], tmp_path: Path) -> None:
    folder = str(FAMILIES["phi3"].make(tmp_path / "phi3"))
    raw["orchestrator"]["policy"]["model"] = folder
    for name in ("rollout", "reference"):
        args(raw, name)["model"] = folder
    raw["orchestrator"]["sampling"] |= {"min_new_tokens": 2, "stop_token_ids": [9]}
    actual = checked(raw, tmp_path).distribution
    assert (actual.vocabulary, actual.min_new_tokens, actual.end_ids) == (len(WORDS), 2, (*ENDS, 9))


def test_an_end_that_is_not_a_token_is_named_where_it_would_have_to_be_masked(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    """GPT-2's own end, 50256, stays in a small model that was made without an end of its own."""
    folder = Path(raw["orchestrator"]["policy"]["model"])
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    GenerationConfig(eos_token_id=50256).save_pretrained(copy)
    raw["orchestrator"]["policy"]["model"] = args(raw, "rollout")["model"] = str(copy)
    assert checked(raw, tmp_path).distribution.end_ids == (EOS, 50256)
    raw["orchestrator"]["sampling"]["min_new_tokens"] = 2
    assert problems(raw, tmp_path) == [
        "orchestrator.sampling.min_new_tokens: 2, but of the tokens that end a text 50256 is not one of the "
        f"tokenizer's {len(WORDS)}; correct eos_token_id in {copy}/generation_config.json"
    ]


def test_a_model_with_less_entries_than_the_tokenizer_is_named(raw: dict[str, Any], tmp_path: Path) -> None:
    small = make_policy(tmp_path / "small", kind="llama", tied=False, vocab_size=60)
    args(raw, "critic")["model"] = str(small)
    assert problems(raw, tmp_path) == [
        f"applications.critic.args.model: {small} has 60 entries in its vocabulary, but the tokenizer of "
        "orchestrator.policy.model gives ids up to 63; resize the model's embeddings"
    ]


def test_the_reference_computes_in_the_policys_precision(raw: dict[str, Any], tmp_path: Path) -> None:
    args(raw, "reference")["dtype"] = "bfloat16"
    assert problems(raw, tmp_path) == [
        "applications.reference.args.dtype: bfloat16, but orchestrator.policy.dtype is float32; the KL penalty would "
        "measure their rounding, so both must be the same"
    ]
    raw["orchestrator"]["algorithm"]["kl"] = {"coef": 0}
    checked(raw, tmp_path)


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


def test_data_that_is_not_text_is_named(raw: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    assert problems(raw, tmp_path) == [
        f"data.path {tmp_path / 'eval.jsonl'}: should be text in UTF-8, but byte 12 is not"
    ]


def test_no_held_out_prompts_are_read_when_evaluation_is_off(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["orchestrator"]["evaluation"]["every"] = 0
    raw["orchestrator"]["data"]["eval_split"] = "none"
    assert checked(raw, tmp_path).held_out is None


def test_precision_and_transport_must_be_the_same_on_both_sides(raw: dict[str, Any], tmp_path: Path) -> None:
    args(raw, "rollout").update(dtype="bfloat16", weight_backend="gloo")
    raw["orchestrator"]["weights"]["backend"] = "ipc"
    assert problems(raw, tmp_path) == [
        "applications.rollout.args.dtype: bfloat16, but orchestrator.policy.dtype is float32; weights are pushed as "
        "they are, so both must be the same",
        "orchestrator.weights.backend: ipc, but applications.rollout.args.weight_backend is gloo; set both the "
        "same, or one to auto",
    ]
    args(raw, "rollout").update(dtype="float32", weight_backend="auto")
    checked(raw, tmp_path)
