"""`quartet init`: what it writes is accepted as it is, and what it refuses is named by its flag."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.commands.checks.preflight import preflight
from orchestrator.commands.init.machine import Machine
from orchestrator.commands.init.write import Wanted, init
from orchestrator.deployment.facts.facts import Facts
from orchestrator.deployment.file import Deployment
from quartet.config.base import ConfigError
from tests.families import FAMILIES
from tests.models import make_policy, make_reward, make_tokenizer
from tests.unit.preflights import args
from tests.untidy import make_untidy

HERE = Machine(cores=2, memory_gib=24)
GPU = Machine(cores=16, memory_gib=128, gpus=1, gpu_gib=79)
FUNCTION = "tests.scorers:count"


def write_prompts(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return write_prompts(tmp_path / "prompts.jsonl", [{"prompt": f"w{4 + i} w{5 + i}"} for i in range(40)])


def written(folder: Path, wanted: Wanted, machine: Machine = HERE) -> dict[str, Any]:
    """The whole file of the facts, once `quartet check`'s own function has accepted it."""
    file = folder / "mine.yaml"
    init(file, wanted, machine)
    deployment = Deployment.load(file, check_services=True)
    preflight(deployment)
    assert deployment.facts
    return deployment.raw


def stated(folder: Path) -> list[str]:
    """The lines of the file that are not comments."""
    return [line for line in (folder / "mine.yaml").read_text().splitlines() if line and not line.startswith("#")]


def test_a_critic_starts_from_the_reward_model(
    policy_folder: Path, reward_folder: Path, prompts: str, tmp_path: Path
) -> None:
    raw = written(tmp_path, Wanted(str(policy_folder), str(reward_folder), prompts))
    assert args(raw, "critic")["model"] == args(raw, "reward")["scorer"]["model"] == str(reward_folder)
    run = raw["orchestrator"]
    # 36 of 40 prompts, of three tokens; the models take 128.
    assert (run["batch_size"], run["algorithm"]["minibatch_size"]) == (32, 8)
    assert (run["data"]["max_prompt_length"], run["sampling"]["max_new_tokens"]) == (8, 64)
    # 4 held-out prompts
    assert run["evaluation"] == {"samples_per_prompt": 8, "max_prompts": 256}
    assert (run["data"]["prompt_split"], run["data"]["eval_split"]) == ("train[:90%]", "train[90%:]")
    assert run["policy"]["packing"] is True
    assert run["algorithm"]["normalise_scores"] is False  # the reward model's own mean and deviation
    assert run["host_gib"] == 24
    frozen = args(raw, "reward")["scorer"], args(raw, "reference")
    assert [(each["packing"], each["batch_tokens"]) for each in frozen] == [(True, 2048)] * 2
    assert run["policy"]["env_vars"]["OMP_NUM_THREADS"] == "1"
    assert run["policy"]["env_vars"]["MALLOC_MMAP_MAX_"] == "0"
    assert run["algorithm"]["old_logprobs"] == "rollout"


def test_a_file_is_six_facts_and_the_rest_as_comments(
    policy_folder: Path, reward_folder: Path, tmp_path: Path
) -> None:
    many = write_prompts(tmp_path / "many.jsonl", [{"prompt": f"w{4 + i % 60} w5"} for i in range(700)])
    wanted = Wanted(str(policy_folder), str(reward_folder), many)
    for machine in (HERE, GPU):
        init(tmp_path / "mine.yaml", wanted, machine, overwrite=True)
        names = [line.partition(":")[0] for line in stated(tmp_path)]
        assert names == ["name", "model", "reward", "prompts", "algorithm", "machine"]
    text = (tmp_path / "mine.yaml").read_text()
    before = Deployment.load(tmp_path / "mine.yaml").raw
    told = {name for name in Facts.model_fields if f"\n# {name}: " in text}
    assert told == set(Facts.model_fields) - set(names)
    assert [line for line in text.splitlines() if line.count("`") % 2] == []  # none is cut off within its code
    # Each comment holds the value that is derived, or an example.
    for name in told - {"services", "orchestrator"}:
        text = text.replace(f"\n# {name}: ", f"\n{name}: ")
    (tmp_path / "mine.yaml").write_text(text)
    assert Deployment.load(tmp_path / "mine.yaml").raw == before


@pytest.mark.parametrize("name", ["mistral", "gpt2", "gemma2", "phi3", "unigram"])
def test_a_function_scores_models_of_any_family(name: str, prompts: str, tmp_path: Path) -> None:
    folder = FAMILIES[name].make(tmp_path / name)
    raw = written(tmp_path, Wanted(str(folder), FUNCTION, prompts))
    assert args(raw, "reward")["scorer"] == {"kind": "function", "function": FUNCTION}
    assert args(raw, "critic")["model"] == str(folder)
    packing = [args(raw, service)["packing"] for service in ("reference", "critic")]
    assert [raw["orchestrator"]["policy"]["packing"], *packing] == [FAMILIES[name].packs] * 3


def test_capped_attention_is_not_packed_even_without_windows(prompts: str, tmp_path: Path) -> None:
    family = FAMILIES["gemma2"]
    capped = replace(family, options=family.options | {"layer_types": ["full_attention"] * 2, "sliding_window": None})
    raw = written(tmp_path, Wanted(str(capped.make(tmp_path / "capped")), FUNCTION, prompts))
    assert (raw["orchestrator"]["policy"]["packing"], args(raw, "critic")["packing"]) == (False, False)


def test_chat_models_get_their_template_and_labels_travel(tmp_path: Path) -> None:
    rows = [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(20)]
    folder = make_untidy(tmp_path / "untidy")
    raw = written(tmp_path, Wanted(str(folder), FUNCTION, write_prompts(tmp_path / "sums.jsonl", rows)))
    data = raw["orchestrator"]["data"]
    assert (data["input_key"], data["label_key"], data["chat_template"]) == ("question", "answer", True)


@pytest.mark.parametrize(
    ("columns", "given", "taken"),
    [
        ({"solution": "w4"}, {}, ("solution", None)),
        ({"answer": "w4", "note": "w5"}, {"input_key": "answer"}, ("answer", None)),
        ({"answer": "w4", "target": "w5"}, {"input_key": "answer"}, ("answer", "target")),
        ({"answer": "w4"}, {"label_key": "answer"}, ("answer", "answer")),
    ],
)
def test_a_prompt_is_its_own_label_only_if_that_is_said(
    columns: dict[str, str], given: dict[str, Any], taken: tuple[str, str | None], policy_folder: Path, tmp_path: Path
) -> None:
    rows = write_prompts(tmp_path / "rows.jsonl", [columns] * 4)
    data = written(tmp_path, Wanted(str(policy_folder), FUNCTION, rows, **given))["orchestrator"]["data"]
    assert (data["input_key"], data.get("label_key")) == taken


def test_a_split_of_its_own_is_held_out(policy_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_prompts(tmp_path / "data" / "train.jsonl", [{"prompt": "w4"}])
    write_prompts(tmp_path / "data" / "test.jsonl", [{"prompt": "w5"}])
    data = written(tmp_path, Wanted(str(policy_folder), FUNCTION, str(tmp_path / "data")))["orchestrator"]["data"]
    assert (data.get("prompt_split"), data["eval_split"], data.get("split_seed")) == (None, "test", None)


def test_a_single_prompt_is_trained_on_and_nothing_held_out(policy_folder: Path, tmp_path: Path) -> None:
    one = write_prompts(tmp_path / "one.jsonl", [{"prompt": "w4"}])
    run = written(tmp_path, Wanted(str(policy_folder), FUNCTION, one))["orchestrator"]
    assert (run["batch_size"], run["algorithm"]["minibatch_size"]) == (1, 1)
    assert preflight(Deployment.load(tmp_path / "mine.yaml", check_services=True)).held_out is None


def test_long_prompts_leave_half_of_the_room_to_responses(policy_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "w4 w5"}, {"prompt": "w5"}, {"prompt": "w6 " * 127}]
    file = tmp_path / "mine.yaml"
    wanted = Wanted(str(policy_folder), FUNCTION, write_prompts(tmp_path / "long.jsonl", rows * 20))
    notes = init(file, wanted, HERE)
    run = Deployment.load(file).raw["orchestrator"]
    assert (run["data"]["max_prompt_length"], run["sampling"]["max_new_tokens"]) == (64, 64)
    assert any("are longer than prompts.max_prompt_length and left out" in note for note in notes)


def test_a_file_for_a_gpu(policy_folder: Path, reward_folder: Path, prompts: str, tmp_path: Path) -> None:
    raw = written(tmp_path, Wanted(str(policy_folder), str(reward_folder), prompts), GPU)
    run = raw["orchestrator"]
    shares = [a["deployments"][0]["ray_actor_options"]["num_gpus"] for a in raw["applications"]]
    assert sum(shares) + run["policy"]["num_gpus"] == pytest.approx(1)
    assert (run["policy"]["dtype"], run["policy"]["zero_stage"], run["gpu_gib"]) == ("bfloat16", 1, 79)
    assert run["policy"]["gradient_checkpointing"] == "auto"
    assert run["algorithm"]["old_logprobs"] == "learner"
    assert args(raw, "reference")["batch_tokens"] == run["policy"]["micro_batch_tokens"] > 2048
    assert "MALLOC_MMAP_MAX_" not in run["policy"]["env_vars"]


def test_adapters_are_trained_where_all_weights_do_not_fit(prompts: str, tmp_path: Path) -> None:
    wide = {"vocab_size": 128 * 1024, "hidden_size": 512}
    folder = str(make_policy(tmp_path / "wide", kind="llama", tied=True, **wide))
    wanted, file = Wanted(folder, FUNCTION, prompts), tmp_path / "mine.yaml"
    assert not any("lora" in note for note in init(file, wanted, HERE))
    rates = Facts.of(yaml.safe_load(file.read_text())).algorithm
    # The gradients, moments and copies of all weights of policy and critic take more than this leaves.
    notes = init(file, wanted, replace(HERE, memory_gib=17.5), overwrite=True)
    told = next(note for note in notes if "lora" in note)
    assert told.startswith("machine.host_gib: one host may have to hold ")
    facts = Facts.of(yaml.safe_load(file.read_text()))
    assert facts.lora
    assert facts.lora.rank == 16
    assert facts.algorithm.learning_rate == pytest.approx(10 * rates.learning_rate)
    preflight(Deployment.load(file, check_services=True))
    with pytest.raises(ConfigError, match=r"machine\.host_gib: one host may have to hold"):
        init(file, wanted, replace(HERE, memory_gib=8), overwrite=True)


def test_a_file_is_not_overwritten_unasked(policy_folder: Path, prompts: str, tmp_path: Path) -> None:
    file, wanted = tmp_path / "mine.yaml", Wanted(str(policy_folder), FUNCTION, prompts)
    file.write_text("kept")
    with pytest.raises(ConfigError, match=r"mine\.yaml exists; give --overwrite to replace it"):
        init(file, wanted, HERE)
    assert file.read_text() == "kept"
    init(file, wanted, HERE, overwrite=True)
    assert "algorithm:" in file.read_text()


def test_wrong_flags_are_named(policy_folder: Path, prompts: str, tmp_path: Path) -> None:
    policy, labels = str(policy_folder), str(make_reward(tmp_path / "labels", labels=3))
    t5 = str(tmp_path / "t5")
    AutoConfig.for_model("t5", num_layers=1).save_pretrained(t5)
    other = tmp_path / "other"
    make_reward(other)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(other)
    columns = write_prompts(tmp_path / "columns.jsonl", [{"a": "w4", "b": "w5"}])
    empty = write_prompts(tmp_path / "empty.jsonl", [])
    hub = (
        "{0}: should be a model's folder, but {1} does not exist; of the Hugging Face hub with its revision, such as "
        "{1}@main"
    )
    for wanted, says in (
        (Wanted("no/such", FUNCTION, prompts), "--model: should be a model's folder, but no/such does not exist"),
        (Wanted(str(tmp_path), FUNCTION, prompts), f"--model: model: {tmp_path} holds no config.json of a model"),
        (Wanted(t5, FUNCTION, prompts), f"--model: model: {t5} does not describe a language model"),
        (Wanted("Qwen/Qwen2.5-0.5B", FUNCTION, prompts), hub.format("--model", "Qwen/Qwen2.5-0.5B")),
        (Wanted(policy, "org/judge", prompts), hub.format("--reward", "org/judge")),
        (
            Wanted(policy, FUNCTION, "openai/gsm8k"),
            f"--prompts: data.path: no such file or folder: openai/gsm8k (looked for {Path.cwd()}/openai/gsm8k); of "
            "the Hugging Face hub with its revision, such as openai/gsm8k@main",
        ),
        (
            Wanted(policy, "judge.py", prompts),
            "--reward: should be a model's folder, but judge.py does not exist; or",
        ),
        (
            Wanted(policy, "my_judge.py:score", prompts),
            "--reward: 'my_judge.py:score' should be package.module:name, but cannot be imported: No module named "
            "'my_judge'; a module is named without its .py: my_judge:score",
        ),
        (
            Wanted(policy, "tests.scorers:absent", prompts),
            "--reward: 'tests.scorers:absent' should be package.module",
        ),
        (Wanted(policy, labels, prompts), f"--reward: {labels} gives 3 numbers to a text; it should be"),
        (Wanted(policy, str(other), prompts), f"--reward: the tokenizer of {other} is not the policy's"),
        (Wanted(policy, FUNCTION, "none.jsonl"), "--prompts: data.path: no such file or folder: none.jsonl"),
        (Wanted(policy, FUNCTION, empty), "--prompts: split 'train' holds no rows"),
        (Wanted(policy, FUNCTION, columns), "--prompts: which column is the prompt? Name it by --input-key: a, b"),
        (
            Wanted(policy, FUNCTION, columns, input_key="c"),
            "--prompts: --input-key: no column 'c'; the columns are a,",
        ),
        (Wanted(policy, FUNCTION, prompts, max_new_tokens=128), "--max-new-tokens: should be less than the 128"),
    ):
        with pytest.raises(ConfigError) as caught:
            init(tmp_path / "mine.yaml", wanted, HERE)
        assert str(caught.value).startswith(says)
        assert not (tmp_path / "mine.yaml").exists()


def test_a_model_without_room_for_responses_is_refused(prompts: str, tmp_path: Path) -> None:
    short = make_policy(tmp_path / "short", kind="llama", tied=False, max_position_embeddings=8)
    with pytest.raises(ConfigError, match="--model: takes 8 tokens in all, which leaves fewer than"):
        init(tmp_path / "mine.yaml", Wanted(str(short), FUNCTION, prompts), HERE)


def test_a_response_that_leaves_no_prompt_is_named_by_its_flag(policy_folder: Path, tmp_path: Path) -> None:
    for words, given, says in (
        (99, None, "--max-new-tokens: 64 of the 128 tokens that the models take leave 64 for a prompt, and the"),
        (9, 120, "--max-new-tokens: 120 of the 128 tokens that the models take leave 8 for a prompt, and the"),
        (127, 1, "--prompts: the shortest has 128 tokens, and the models take 128 in all"),
    ):
        rows = write_prompts(
            tmp_path / "rows.jsonl", [{"prompt": "w4 " * words}, {"prompt": "w4 " * (words + 9)}] * 3
        )
        with pytest.raises(ConfigError) as caught:
            init(tmp_path / "mine.yaml", Wanted(str(policy_folder), FUNCTION, rows, max_new_tokens=given), HERE)
        assert str(caught.value).startswith(says)
    rows = write_prompts(tmp_path / "rows.jsonl", [{"prompt": "w4 " * 99}] * 6)
    run = written(tmp_path, Wanted(str(policy_folder), FUNCTION, rows, max_new_tokens=28))["orchestrator"]
    assert (run["data"]["max_prompt_length"], run["sampling"]["max_new_tokens"]) == (100, 28)


def test_the_command_writes_for_this_machine_and_check_says_fine(
    policy_folder: Path, reward_folder: Path, prompts: str, tmp_path: Path
) -> None:
    file = str(tmp_path / "a run.yaml")
    flags = ("--model", str(policy_folder), "--reward", str(reward_folder), "--prompts", prompts)
    done = CliRunner().invoke(app, ["init", file, *flags])
    assert (done.exit_code, done.exception) == (0, None)
    assert CliRunner().invoke(app, ["check", file]).exit_code == 0
    assert yaml.safe_load(Path(file).read_text())["name"] == "a-run"
    assert f"quartet up '{file}' && quartet train '{file}'" in done.stderr


def test_a_service_that_runs_scores(policy_folder: Path, prompts: str, tmp_path: Path) -> None:
    raw = written(tmp_path, Wanted(str(policy_folder), "127.0.0.1:19000/taste", prompts))
    assert [application["name"] for application in raw["applications"]] == ["rollout", "reference", "critic"]
    assert raw["orchestrator"]["services"] == {"reward": {"target": "127.0.0.1:19000", "scorer": "taste"}}
    assert args(raw, "critic")["model"] == str(policy_folder)
