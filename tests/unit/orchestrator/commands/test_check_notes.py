"""Notes of `quartet check` and `quartet train` about a run that can start but may not be meant so."""

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models import WORDS, make_tokenizer
from tests.unit.preflights import args, checked

MASK = "orchestrator.algorithm.max_token_staleness: 2 leaves"


@pytest.mark.parametrize(
    ("loop", "notes"),
    [
        ({"max_staleness": 0}, [f"{MASK} no token out, as orchestrator.loop.max_staleness is 0"]),
        ({"max_staleness": 2}, [f"{MASK} no token out, as orchestrator.loop.max_staleness is 2"]),
        ({"max_staleness": 3, "depth": 2}, []),
        (
            {"max_staleness": 3},
            [
                f"{MASK} most tokens out, as batches are sampled 3 ahead; give a larger one, or "
                "orchestrator.loop.depth 2"
            ],
        ),
    ],
)
def test_a_mask_of_no_tokens_or_of_most_is_told(
    raw: dict[str, Any], tmp_path: Path, loop: dict[str, Any], notes: list[str]
) -> None:
    raw["orchestrator"]["algorithm"]["max_token_staleness"] = 2
    raw["orchestrator"]["loop"] = loop
    assert checked(raw, tmp_path).notes == notes


def test_tokens_of_no_policy_want_a_correction_that_leaves_them_out(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["orchestrator"] |= {"loop": {"max_staleness": 1}, "weights": {"in_flight": "keep-cache"}}
    assert checked(raw, tmp_path).notes == [
        "orchestrator.weights.in_flight: keep-cache samples tokens under mixed weights, and algorithm.correction tis "
        "leaves none out; choose correction icepop or geometric, clip dis or in_flight keep"
    ]
    raw["orchestrator"]["algorithm"]["correction"] = "icepop"
    assert checked(raw, tmp_path).notes == []


def test_a_chat_model_that_gets_bare_prompts_is_told_unless_the_file_says_so(
    raw: dict[str, Any], tmp_path: Path, policy_folder: Path
) -> None:
    policy = copytree(policy_folder, tmp_path / "policy")
    raw["orchestrator"]["policy"]["model"] = args(raw, "rollout")["model"] = str(policy)
    assert checked(raw, tmp_path).notes == []
    (policy / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert checked(raw, tmp_path).notes == [
        f"orchestrator.data.chat_template: not given, so {policy} gets the prompts as they are, without its chat "
        "template; true puts each into it, false says that this is meant"
    ]
    for given in (False, True):
        raw["orchestrator"]["data"]["chat_template"] = given
        assert checked(raw, tmp_path).notes == []


def test_a_schedule_that_does_not_end_with_the_run_is_told(raw: dict[str, Any], tmp_path: Path) -> None:
    run = raw["orchestrator"]
    run |= {"steps": 10, "batch_size": 33}
    run["algorithm"] = {"epochs": 2, "minibatch_size": 32}
    cosine = {"learning_rate": 1.0e-4, "schedule": "cosine"}
    run["policy"]["optimizer"] = cosine
    args(raw, "critic")["optimizer"] = cosine | {"total_steps": 40}

    def told() -> list[str]:
        return [note for note in checked(raw, tmp_path).notes if "total_steps" in note]

    assert told() == []
    args(raw, "critic")["optimizer"] = cosine | {"total_steps": 20}
    run["policy"]["optimizer"] = cosine | {"total_steps": 30}
    assert told() == [
        f"{where}.optimizer.total_steps: {ends}, but the run has 40 optimizer steps "
        "(steps * algorithm.epochs * minibatches)"
        for where, ends in (("orchestrator.policy", 30), ("applications.critic.args", 20))
    ]
    run["policy"]["optimizer"], run["algorithm"]["critic_epochs"] = cosine, 3
    assert told() == [
        "applications.critic.args.optimizer.total_steps: 20, but the run has 60 optimizer steps "
        "(steps * algorithm.critic_epochs * minibatches)"
    ]
    run["policy"]["optimizer"] = cosine | {"total_steps": 40}
    run["algorithm"] |= {"critic_epochs": 1, "critic_only_steps": 4}
    assert told() == [
        "orchestrator.policy.optimizer.total_steps: 40, but the run has 24 optimizer steps "
        "((steps - algorithm.critic_only_steps) * algorithm.epochs * minibatches)"
    ]


@pytest.mark.parametrize(("dtype", "told"), [("bfloat16", True), ("float32", False)])
def test_ratios_to_an_engine_that_rounds_are_told(
    raw: dict[str, Any], tmp_path: Path, dtype: str, told: bool
) -> None:
    raw["orchestrator"]["algorithm"]["old_logprobs"] = "rollout"
    raw["orchestrator"]["policy"] |= {"dtype": dtype, "zero_stage": int(dtype == "bfloat16")}
    for name in ("rollout", "reference"):
        args(raw, name)["dtype"] = dtype
    notes = [note for note in checked(raw, tmp_path).notes if "old_logprobs: rollout counts" in note]
    assert len(notes) == told


def test_adapters_that_are_merged_into_bfloat16_are_told(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["orchestrator"]["policy"] |= {"lora": {"rank": 2}, "dtype": "bfloat16", "zero_stage": 1}
    for name in ("rollout", "reference"):
        args(raw, name)["dtype"] = "bfloat16"
    [note] = checked(raw, tmp_path).notes
    assert note.startswith("orchestrator.policy.lora: merged into bfloat16 weights for each push")
    raw["orchestrator"]["weights"], args(raw, "rollout")["adapters"] = {"adapters": True}, {"rank": 2}
    assert checked(raw, tmp_path).notes == []
    raw["orchestrator"]["weights"], args(raw, "rollout")["adapters"] = {}, None
    raw["orchestrator"]["policy"]["dtype"] = "float32"
    for name in ("rollout", "reference"):
        args(raw, name)["dtype"] = "float32"
    assert checked(raw, tmp_path).notes == []


def test_an_architecture_that_was_not_tried_is_told(raw: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "falcon"
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": len(WORDS)}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("falcon", **shape)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    args(raw, "critic")["model"] = str(folder)
    assert checked(raw, tmp_path).notes == [
        f"applications.critic.args.model: {folder} is of the architecture falcon, which Quartet was not tried with; "
        "see docs/models.md"
    ]


def test_keys_of_the_critic_that_belong_to_the_kind_are_told(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["orchestrator"]["algorithm"] = {"kind": "sao"}
    assert checked(raw, tmp_path).notes == [
        "applications.critic.args.freeze_attention: false, but true belongs to orchestrator.algorithm.kind sao; set "
        "it, unless the run is to differ"
    ]
    args(raw, "critic")["freeze_attention"] = True
    assert checked(raw, tmp_path).notes == []
    # Adapters leave all other weights as they are, and are refused beside it.
    args(raw, "critic").update(freeze_attention=False, lora={"rank": 2})
    assert checked(raw, tmp_path).notes == []


def test_prompts_that_are_left_out_are_told(raw: dict[str, Any], tmp_path: Path) -> None:
    # With the first token, the prompts of a split have 2, 3, 4 and 5.
    raw["orchestrator"]["data"]["max_prompt_length"] = 4
    assert checked(raw, tmp_path).notes == [
        f"1 of 4 prompts of {split} are longer than data.max_prompt_length and left out"
        for split in ("train", "eval")
    ]


def test_a_smaller_last_minibatch_is_told(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["orchestrator"].update(batch_size=30)
    raw["orchestrator"]["algorithm"]["minibatch_size"] = 8
    assert checked(raw, tmp_path).notes == [
        "orchestrator.algorithm.minibatch_size: 8 does not divide batch_size 30; the last minibatch of each epoch "
        "has 6 samples"
    ]
    raw["orchestrator"].update(batch_size=32)
    assert checked(raw, tmp_path).notes == []


@pytest.mark.parametrize("backend", ["auto", "gloo", "ipc"])
def test_a_push_that_other_machines_can_reach_is_told(raw: dict[str, Any], tmp_path: Path, backend: str) -> None:
    args(raw, "rollout")["weight_backend"] = backend
    cases = (("127.0.0.1", None), ("localhost", None), ("10.0.0.5", "10.0.0.5"), (None, "the policy's node"))
    for host, reached in cases:
        raw["orchestrator"]["weights"] = {"backend": backend, "host": host}
        notes = checked(raw, tmp_path).notes
        told = reached is not None and backend != "ipc"
        assert [note.partition(":")[0] for note in notes] == ["orchestrator.weights.host"] * told
        assert all(f"every machine and user that reaches {reached} can read the weights" in note for note in notes)
