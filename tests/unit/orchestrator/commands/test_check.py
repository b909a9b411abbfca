"""Faults that `quartet check` and `quartet train` name before anything is started."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import yaml
from transformers import GenerationConfig, LlamaConfig, Phi3Config
from typer.testing import CliRunner

from orchestrator.algorithms.registry import kinds
from orchestrator.cli import app
from orchestrator.commands.checks.architectures import too_long_for_model
from orchestrator.commands.checks.preflight import preflight
from orchestrator.deployment.file import Deployment
from services.rollout.config import RolloutConfig
from tests.families import ENDS, FAMILIES
from tests.models import EOS, MAX_LENGTH, WORDS, make_policy
from tests.unit.preflights import SUM, application, args, ask, checked, problems, refused

Change = Callable[[dict[str, Any], Path], object]


def run(raw: dict[str, Any], section: str) -> dict[str, Any]:
    actual: dict[str, Any] = raw["orchestrator"][section]
    return actual


def without(raw: dict[str, Any], name: str) -> None:
    raw["applications"] = [entry for entry in raw["applications"] if entry["name"] != name]


REFUSED: list[tuple[Change, list[str]]] = [
    # The data and what is made of it.
    (
        lambda raw, _: run(raw, "data").update(prompt_split="trian"),
        ["data.path {folder}: no split 'trian'; the splits there are eval, train"],
    ),
    (
        lambda raw, _: run(raw, "data").update(eval_split="train[2:]"),
        ["data.prompt_split 'train' and data.eval_split 'train[2:]' share 2 row(s) of 'train', row 2 for one; "],
    ),
    (
        lambda raw, _: run(raw, "data").update(prompt_split="train[4:]"),
        ["data split 'train[4:]': the range is rows 4 to 4 (the end not included), but the split holds 4 rows; "],
    ),
    (
        lambda raw, _: run(raw, "data").update(max_prompt_length=1),
        [f"data.path {{folder}}, split '{split}': no prompt left of 4: " for split in ("train", "eval")],
    ),
    (
        lambda _, folder: (folder / "eval.jsonl").write_text(""),
        ["data.path {folder}, split 'eval': holds no rows"],
    ),
    (
        lambda _, folder: (folder / "eval.jsonl").write_bytes(b'{"prompt": "\xff"}\n'),
        ["data.path {folder}/eval.jsonl: should be text in UTF-8, but byte 12 is not"],
    ),
    (
        lambda raw, _: run(raw, "sampling").update(max_new_tokens=49),
        [f"applications.rollout.args.max_length: 64, but {SUM} is 65"],
    ),
    (
        lambda raw, folder: args(raw, "critic").update(
            model=str(make_policy(folder / "small", kind="llama", tied=False, vocab_size=60))
        ),
        ["applications.critic.args.model: {folder}/small has 60 entries in its vocabulary, but the tokenizer "],
    ),
    # Functions of one's own.
    (
        lambda raw, _: run(raw, "evaluation").update(judges={"gold": "no.such:score", "words": "tests.scorers:none"}),
        ["orchestrator.evaluation.judges.gold: 'no.such:score' should be package.module:name, but cannot be "],
    ),
    (
        lambda raw, folder: (
            (folder / "broken_judge.py").write_text("1 / 0\n"),
            run(raw, "evaluation").update(judges={"gold": "broken_judge:score"}),
        ),
        ["orchestrator.evaluation.judges.gold: importing broken_judge fails with ZeroDivisionError: "],
    ),
    # The same in one place as in another.
    (
        lambda raw, _: (
            args(raw, "rollout").update(dtype="bfloat16", weight_backend="gloo"),
            raw["orchestrator"].update(weights={"backend": "ipc"}),
        ),
        [
            "applications.rollout.args.dtype: bfloat16, but orchestrator.policy.dtype is float32; ",
            "orchestrator.weights.backend: ipc, but applications.rollout.args.weight_backend is gloo; ",
        ],
    ),
    (
        lambda raw, _: raw["orchestrator"].update(weights={"adapters": True}),
        ["orchestrator: weights.adapters: true, but policy.lora is null, so that all weights are trained; leave "],
    ),
    (
        lambda raw, _: (
            args(raw, "rollout").update(adapters={"rank": 4}),
            run(raw, "policy").update(lora={"rank": 2, "seed": 1}),
            raw["orchestrator"].update(weights={"adapters": True}),
        ),
        [
            'applications.rollout.args.adapters: {{"rank": 4, "target_modules": null}}, but the run '
            'pushes {{"rank": 2, "target_modules": null}} (policy.lora with ',
        ],
    ),
    (
        lambda raw, _: (
            args(raw, "rollout").update(adapters={"rank": 4}, adapter_versions=2),
            run(raw, "policy").update(lora={"rank": 4}),
            raw["orchestrator"].update(weights={"adapters": True, "in_flight": "finish"}, loop={"max_staleness": 2}),
        ),
        ["applications.rollout.args.adapter_versions: 2, but the run needs 3 (one more than "],
    ),
    (
        lambda raw, _: (
            args(raw, "rollout").update(adapters={"rank": 4}, adapter_versions=2),
            run(raw, "policy").update(lora={"rank": 4}),
            raw["orchestrator"].update(weights={"adapters": True}),
        ),
        ["applications.rollout.args.adapter_versions: 2, but the run needs 1 (one more than "],
    ),
    (
        lambda raw, _: args(raw, "rollout").update(adapter_versions=2),
        ["applications.rollout.args: adapter_versions: 2, but adapters is null; leave it out"],
    ),
    (
        lambda raw, _: raw["orchestrator"].update(weights={"in_flight": "finish"}, loop={"max_staleness": 1}),
        ["orchestrator: weights.in_flight: finish is for pushes of adapters alone, of which engines keep several "],
    ),
    (
        lambda raw, _: (
            args(raw, "rollout").update(adapters={"rank": 4}),
            run(raw, "policy").update(lora={"rank": 4}),
            raw["orchestrator"].update(weights={"adapters": True, "in_flight": "finish"}),
        ),
        ["orchestrator: weights.in_flight: finish is for sampling ahead, and loop.max_staleness is 0; leave it out"],
    ),
    (
        lambda raw, _: args(raw, "rollout").update(adapters={"rank": 4}),
        [
            'applications.rollout.args.adapters: {{"rank": 4, "target_modules": null}}, but the run '
            "pushes null (policy.lora with orchestrator.weights.adapters true, else null); both must be the same",
        ],
    ),
    (
        lambda raw, folder: (
            args(raw, "rollout").update(
                adapters={"rank": 4}, model=str(make_policy(folder / "other", kind="llama", tied=False, seed=9))
            ),
            run(raw, "policy").update(lora={"rank": 4}),
            raw["orchestrator"].update(weights={"adapters": True}),
        ),
        ["applications.rollout.args.model: {folder}/other has other weights than orchestrator.policy.model ("],
    ),
    (
        lambda raw, _: (args(raw, "rollout").update(max_phase_s=20), args(raw, "critic").update(root="/elsewhere")),
        [
            "orchestrator.weights.timeout_s: 30, but applications.rollout.args.max_phase_s is 20; ",
            "orchestrator.weights.commit_s: 30, but applications.rollout.args.max_phase_s is 20; ",
            "orchestrator.checkpoint.root: runs, but applications.critic.args.root is /elsewhere; ",
        ],
    ),
    (
        lambda raw, folder: (
            (folder / "file").write_text(""),
            raw["orchestrator"].update(
                save=str(folder / "file"), checkpoint={"folder": str(folder / "kept"), "root": str(folder / "runs")}
            ),
            args(raw, "critic").update(root=str(folder / "runs")),
        ),
        [
            "orchestrator.save: {folder}/file exists and Quartet did not write it ",
            "orchestrator.checkpoint.folder: {folder}/kept is not under orchestrator.checkpoint.root, {folder}/runs;",
        ],
    ),
    (
        lambda raw, folder: (
            (folder / "file").write_text(""),
            raw["orchestrator"].update(save=str(folder / "file" / "policy")),
        ),
        ["orchestrator.save: {folder}/file is a file and should be a folder; "],
    ),
    (
        lambda raw, _: raw["orchestrator"].update(batch_size=1 << 20),
        ["orchestrator.batch_size: 1048576, but applications.critic.args.train_limits.max_call_rows is 65536; "],
    ),
]


@pytest.mark.parametrize(("change", "starts"), REFUSED)
def test_a_file_with_which_no_run_can_start_is_refused_by_field(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, starts: list[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    change(raw, tmp_path)
    refused(raw, tmp_path, *(start.format(folder=tmp_path) for start in starts))


def test_a_run_that_can_start(raw: dict[str, Any], tmp_path: Path) -> None:
    inputs = checked(raw, tmp_path)
    assert len(inputs.train.prompts) == 4
    assert inputs.held_out
    assert list(inputs.judges) == ["words"]
    assert inputs.notes == []


def test_no_held_out_prompts_are_read_when_evaluation_is_off(raw: dict[str, Any], tmp_path: Path) -> None:
    run(raw, "evaluation")["every"] = 0
    run(raw, "data")["eval_split"] = "none"
    assert checked(raw, tmp_path).held_out is None


def test_without_a_kl_penalty_a_file_needs_no_reference(raw: dict[str, Any], tmp_path: Path) -> None:
    without(raw, "reference")
    refused(
        raw, tmp_path, "applications: none is named reference; a run needs none if orchestrator.algorithm.kl.coef"
    )
    run(raw, "algorithm")["kl"] = {"coef": 0}
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
    without(raw, "critic")
    needs_none = f"a run needs none if orchestrator.algorithm.kind is {kinds(critic=False)}"
    refused(raw, tmp_path, f"applications: none is named critic; {needs_none}")
    raw["orchestrator"]["algorithm"] |= algorithm
    assert checked(raw, tmp_path).notes == []
    assert Deployment.load(tmp_path / "a.yaml").orchestrator.services.used == ("rollout", "reward", "reference")
    # One that is there all the same is told, and not used.
    raw["applications"] = every
    args(raw, "critic")["root"] = "elsewhere"
    [note] = checked(raw, tmp_path).notes
    assert note.startswith(
        "applications.critic: a critic that the run does not use, as orchestrator.algorithm.kind is "
    )
    assert Deployment.load(tmp_path / "a.yaml").orchestrator.services.used == ("rollout", "reward", "reference")


def test_the_reference_computes_in_the_policys_precision(raw: dict[str, Any], tmp_path: Path) -> None:
    args(raw, "reference")["dtype"] = "bfloat16"
    refused(
        raw, tmp_path, "applications.reference.args.dtype: bfloat16, but orchestrator.policy.dtype is float32; the KL"
    )
    run(raw, "algorithm")["kl"] = {"coef": 0}
    checked(raw, tmp_path)


def test_what_is_sampled_from_is_read_from_the_policy(raw: dict[str, Any], tmp_path: Path) -> None:
    folder = str(FAMILIES["phi3"].make(tmp_path / "phi3"))
    for section in (run(raw, "policy"), args(raw, "rollout"), args(raw, "reference")):
        section["model"] = folder
    raw["orchestrator"]["sampling"] |= {"min_new_tokens": 2, "stop_token_ids": [9]}
    actual = checked(raw, tmp_path).distribution
    assert (actual.vocabulary, actual.min_new_tokens, actual.end_ids) == (len(WORDS), 2, (*ENDS, 9))


def test_an_end_that_is_not_a_token_is_named_where_it_would_have_to_be_masked(
    raw: dict[str, Any], policy_folder: Path, tmp_path: Path
) -> None:
    """GPT-2's own end, 50256, stays in a small model that was made without an end of its own."""
    copy = copytree(policy_folder, tmp_path / "copy")
    GenerationConfig(eos_token_id=50256).save_pretrained(copy)
    run(raw, "policy")["model"] = args(raw, "rollout")["model"] = str(copy)
    assert checked(raw, tmp_path).distribution.end_ids == (EOS, 50256)
    run(raw, "sampling")["min_new_tokens"] = 2
    refused(
        raw, tmp_path, "orchestrator.sampling.min_new_tokens: 2, but of the tokens that end a text 50256 is not one "
    )


def test_texts_must_end_alike_where_they_must_not_end_early(
    raw: dict[str, Any], policy_folder: Path, tmp_path: Path
) -> None:
    copy = copytree(policy_folder, tmp_path / "copy")
    GenerationConfig(eos_token_id=[EOS, 9]).save_pretrained(copy)
    args(raw, "rollout")["model"] = str(copy)
    checked(raw, tmp_path)
    run(raw, "sampling")["min_new_tokens"] = 2
    refused(
        raw,
        tmp_path,
        f"applications.rollout.args.model: texts of {copy} end with the tokens [{EOS}, 9], but those of",
    )
    run(raw, "sampling")["stop_token_ids"] = [9]
    checked(raw, tmp_path)


def test_lengths_must_fit_every_service_and_model(
    raw: dict[str, Any], policy_folder: Path, reward_folder: Path, tmp_path: Path
) -> None:
    # 16 for the prompt and 113 for the response, one more than the models take.
    run(raw, "sampling")["max_new_tokens"] = 113
    args(raw, "rollout")["max_length"] = 129
    args(raw, "reward")["max_length"] = 128
    refused(
        raw,
        tmp_path,
        f"applications.reward.args.max_length: 128, but {SUM} is 129",
        f"{SUM} is 129 tokens, but orchestrator.policy.model ({policy_folder}) takes {MAX_LENGTH}, "
        f"applications.reward.args.scorer.model ({reward_folder}) takes {MAX_LENGTH} (max_position_embeddings)",
        f"applications.rollout.args.max_length: 129, but {policy_folder} takes {MAX_LENGTH} tokens",
    )
    run(raw, "sampling")["max_new_tokens"] = 112
    args(raw, "rollout")["max_length"] = 128
    checked(raw, tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(max_position_embeddings=64, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        Phi3Config(
            max_position_embeddings=256,
            original_max_position_embeddings=64,
            rope_scaling={"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
        ),
    ],
)
def test_a_rotation_that_depends_on_the_length_must_not_change_with_it(config: Any, tmp_path: Path) -> None:
    """vLLM would rotate short sequences as long ones, transformers would not."""
    config.save_pretrained(tmp_path)
    kind = config.rope_parameters["rope_type"]
    short, long = (
        list(too_long_for_model(RolloutConfig(model=str(tmp_path), max_length=length), "rollout"))
        for length in (64, 65)
    )
    assert short == []
    [line] = long
    assert line.startswith(
        f"applications.rollout.args.max_length: 65, but {tmp_path} rotates longer sequences than 64"
    )
    assert f"(rope_type {kind})" in line


def test_a_reward_function_must_be_one(raw: dict[str, Any], tmp_path: Path) -> None:
    function = {"kind": "function", "function": "tests.scorers:count"}
    several = {"words": function, "none": function | {"function": "math:no"}}
    args(raw, "reward")["scorer"] = {"kind": "several", "scorers": several}
    raw["orchestrator"]["algorithm"]["rewards"] = {"words": {}, "none": {}}
    field = "applications.reward.args.scorer.scorers.none.function"
    refused(raw, tmp_path, f"{field}: 'math:no' should be package.module:name, but cannot be imported: ")
    # Where the service has an environment of its own, it is for the service to say.
    application(raw, "reward")["runtime_env"] = {"working_dir": "https://host/code.zip"}
    checked(raw, tmp_path)


def test_every_score_has_a_weight_and_every_weight_a_score(raw: dict[str, Any], tmp_path: Path) -> None:
    function = {"kind": "function", "function": "tests.scorers:two", "names": ["right", "words"]}
    field, scorer = "orchestrator.algorithm.rewards", "applications.reward.args.scorer"
    args(raw, "reward")["scorer"] = function
    refused(raw, tmp_path, f"{field}: lacks right, words, as {scorer} gives right, words; give each its weight, or 0")
    algorithm = raw["orchestrator"]["algorithm"]
    algorithm["rewards"] = {"right": {}, "wrods": {}}
    refused(
        raw,
        tmp_path,
        f"{field}: lacks words, as {scorer} gives right, words; ",
        f"{field}: has wrods, but {scorer} gives right, words; leave out what it does not give",
    )
    algorithm["rewards"] = {"right": {"weight": [[1, 0.5], [9, 2]]}, "words": {"weight": 0}}
    checked(raw, tmp_path)
    args(raw, "reward")["scorer"] = function | {"names": []}
    refused(raw, tmp_path, f"{field}: has right, words, but {scorer} gives one score without a name; leave out")
    # Of a service that the run does not use it says nothing.
    raw["orchestrator"]["services"] = {"reward": {"target": "127.0.0.1:1"}}
    checked(raw, tmp_path)


def test_a_scorer_without_the_column_that_it_needs_is_refused(raw: dict[str, Any], tmp_path: Path) -> None:
    field, data = "applications.reward.args.scorer", raw["orchestrator"]["data"]
    data.update(label_key=None, columns=[])
    for scorer, needs in (
        ({"kind": "exact"}, "expected: the label, but orchestrator.data.label_key names none"),
        ({"kind": "math", "expected": "tone"}, "expected: 'tone', which the run does not send"),
        ({"kind": "regex"}, "expected: the label"),
        ({"kind": "json_schema", "expected": "tone"}, "expected: 'tone'"),
        ({"kind": "column"}, "column: 'result', which the run does not send"),
    ):
        args(raw, "reward")["scorer"] = scorer
        refused(raw, tmp_path, f"{field}.{needs}")
    parts = {"right": {"kind": "exact"}, "polite": {"kind": "regex", "pattern": "please"}}
    args(raw, "reward")["scorer"] = {"kind": "several", "scorers": parts}
    raw["orchestrator"]["algorithm"]["rewards"] = {"right": {}, "polite": {}}
    refused(raw, tmp_path, f"{field}.scorers.right.expected: the label")
    parts["right"]["expected"] = "prompt"
    data.update(columns=["prompt"])
    checked(raw, tmp_path)
    raw["orchestrator"]["algorithm"]["rewards"] = {}
    data.update(label_key="prompt", columns=[])
    for kind, given in (("exact", {}), ("json_schema", {}), ("column", {"missing": 0})):
        args(raw, "reward")["scorer"] = {"kind": kind, **given}
        checked(raw, tmp_path)


def test_a_run_is_compared_with_the_scorer_that_it_asks_and_with_no_other(
    raw: dict[str, Any], policy_folder: Path, tmp_path: Path
) -> None:
    """Others may have another tokenizer, or none, other names and other lengths."""
    other = copytree(policy_folder, tmp_path / "other")
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace('"w4"', '"v4"'))
    function, section = {"kind": "function", "function": "tests.scorers:two"}, args(raw, "reward")
    ours = function | {"names": ["right", "words"], "tokenizer": section.pop("tokenizer")}
    foreign = function | {"tokenizer": str(other), "max_length": 4}
    section["scorers"] = {"ours": ours, "foreign": foreign, "texts": function, "taste": section.pop("scorer")}
    application(raw, "reward")["deployments"] = [{"name": "foreign", "num_replicas": 2}, {"name": "Reward"}]
    raw["orchestrator"]["algorithm"]["rewards"] = {"right": {}, "words": {}}
    named, where = "foreign, ours, taste, texts", "applications.reward.args"
    for wrong, problem in (("", "required, as there are several"), ("our", "'our' is none of those there are")):
        raw["orchestrator"]["services"] = {"reward": {"scorer": wrong}}
        refused(raw, tmp_path, f"orchestrator.services.reward.scorer: {problem}: {named}")
    raw["orchestrator"]["services"] = {"reward": {"scorer": "ours"}}
    checked(raw, tmp_path)
    ours["max_length"] = 8
    refused(raw, tmp_path, f"{where}.scorers.ours.max_length: 8, but {SUM} is 48")
    del ours["max_length"], ours["tokenizer"]
    refused(raw, tmp_path, f"{where}.tokenizer: required, as a run sends token ids; set it to {policy_folder}")
    ours["tokenizer"] = str(other)
    refused(raw, tmp_path, f"{where}.scorers.ours.tokenizer: the tokenizer of {other} is not that of orchestrator.p")
    raw["orchestrator"]["services"] = {"reward": {"scorer": "texts"}}
    weights = "orchestrator.algorithm.rewards: has right, words, but "
    refused(
        raw, tmp_path, f"{where}.tokenizer: required, as a run", f"{weights}{where}.scorers.texts gives one score"
    )


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
    run(raw, "data")["path"] = "/no/such/prompts"
    refused(
        raw,
        tmp_path,
        "applications.rollout.args.dtype: bfloat16, but ",
        f"applications.reward.args.tokenizer: the tokenizer of {other} is not that of orchestrator.policy.model ",
        "data.path: no such file or folder: /no/such/prompts",
    )


def test_services_on_another_machine_are_left_to_what_they_say(raw: dict[str, Any], tmp_path: Path) -> None:
    args(raw, "rollout").update(model="/on/another/machine", dtype="bfloat16")
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(raw))
    assert len(preflight(Deployment.load(path)).train.prompts) == 4


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (
            {"hidden_size": 128},
            "sizes differ: model.embed_tokens.weight float32[335, 64] pushed, float32[335, 128] here",
        ),
        ({"num_hidden_layers": 3}, "the push lacks model.layers.2.self_attn.q_proj.weight"),
        ({"num_hidden_layers": 1}, "this replica's model lacks model.layers.1.self_attn.q_proj.weight"),
    ],
)
def test_a_rollout_model_that_the_policy_cannot_be_pushed_to(
    raw: dict[str, Any], tmp_path: Path, shape: dict[str, int], said: str
) -> None:
    args(raw, "rollout")["model"] = str(make_policy(tmp_path / "other", kind="llama", tied=False, **shape))
    [line] = problems(raw, tmp_path)
    assert line.startswith(f"applications.rollout.args.model: {tmp_path}/other cannot take the weights of ")
    assert said in line


def test_another_copy_of_the_same_model_is_as_good(raw: dict[str, Any], policy_folder: Path, tmp_path: Path) -> None:
    args(raw, "rollout")["model"] = str(copytree(policy_folder, tmp_path / "copy"))
    checked(raw, tmp_path)


def test_what_has_to_share_a_gpu_must_fit_on_it(raw: dict[str, Any], tmp_path: Path) -> None:
    """The models are tiny: what is left are the KV cache of 64 MiB or so, and what each process takes by itself."""
    ask(raw, "rollout", num_gpus=0.5)
    run(raw, "policy")["num_gpus"] = 0.5
    raw["orchestrator"]["gpu_gib"] = 2.5
    refused(raw, tmp_path, "orchestrator.gpu_gib: one GPU may have to hold rollout ")
    raw["orchestrator"]["gpu_gib"] = 8
    checked(raw, tmp_path)
    # What never shares a GPU is not added up.
    raw["orchestrator"]["gpu_gib"], run(raw, "policy")["num_gpus"] = 3, 0.6
    checked(raw, tmp_path)


def test_what_may_be_on_one_host_must_fit_there_and_check_prints_the_sums(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    """The models are tiny: what is left are the KV cache of 64 MiB or so, and what each process takes by itself."""
    run(raw, "policy")["num_gpus"] = 0.5
    raw["orchestrator"] |= {"gpu_gib": 8, "host_gib": 10}
    [line] = problems(raw, tmp_path)
    assert line.startswith("orchestrator.host_gib: one host may have to hold rollout 2.")
    assert " GiB, but has 10; the largest part, 2, is libraries of rollout: put less on a host" in line
    raw["orchestrator"]["host_gib"] = 30
    checked(raw, tmp_path)
    said = " ".join(CliRunner().invoke(app, ["check", str(tmp_path / "a.yaml")]).output.split())
    policy = r"memory of policy: (\d\.\d) on a GPU and 2\.\d on a host "
    assert re.search(policy + r".*one GPU: policy \1 = \1 of 8", said)
    assert re.search(r"one host: rollout 2\.\d .* = \d\d of 30 GiB", said)
    assert said.endswith("a.yaml: fine")
    for key in ("gpu_gib", "host_gib"):
        del raw["orchestrator"][key]
    checked(raw, tmp_path)
    raw["orchestrator"]["algorithm"] = {"kind": "ppo", "gae_lambda": 0.9}
    checked(raw, tmp_path)
    said = " ".join(CliRunner().invoke(app, ["check", str(tmp_path / "a.yaml")]).output.split())
    assert "memory of" not in said
    filled = "kind ppo fills in baseline critic, scale batch; set otherwise: gae_lambda 0.9"
    assert f"orchestrator.algorithm: {filled}" in said


@pytest.mark.parametrize(
    ("backend", "policy", "replica", "reason"),
    [
        ("nccl", 0, 0.5, "orchestrator.policy.num_gpus is 0, so the learner is on a CPU"),
        ("cuda-ipc", 0.5, 0, "the replicas' ray_actor_options have no num_gpus, so they are on a CPU"),
        ("nccl", 0.5, 0.5, "the policy's num_gpus and a replica's are 1 together: they may share a GPU"),
        ("cuda-ipc", 0.6, 0.5, "the policy's num_gpus and a replica's are 1.1 together: they never share a GPU"),
        ("nccl", 0.6, 0.5, ""),
        ("cuda-ipc", 0.5, 0.5, ""),
        ("ipc", 0, 0, ""),
    ],
)
def test_a_backend_that_the_files_gpus_rule_out_is_refused(
    raw: dict[str, Any], tmp_path: Path, backend: str, policy: float, replica: float, reason: str
) -> None:
    ask(raw, "rollout", num_gpus=replica)
    run(raw, "policy")["num_gpus"] = policy
    raw["orchestrator"]["weights"] = raw["orchestrator"].get("weights", {}) | {"backend": backend}
    if not reason:
        checked(raw, tmp_path)
        return
    refused(raw, tmp_path, f"orchestrator.weights.backend: {backend}, but {reason}")
    # GPUs that are chosen by hand are known to the processes only.
    application(raw, "rollout")["runtime_env"] = {"env_vars": {"CUDA_VISIBLE_DEVICES": "6"}}
    checked(raw, tmp_path)
