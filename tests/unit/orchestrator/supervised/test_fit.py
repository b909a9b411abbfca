"""Trainings on examples from a file to a model: what they write, and what a run that was ended goes on with."""

from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from orchestrator.commands.supervised import Order, TrainingFile
from orchestrator.monitoring.metrics import RUN_LOG
from orchestrator.report.page import write_report
from orchestrator.supervised.contract import Supervised
from orchestrator.supervised.registry import TRAININGS
from quartet.config.base import ConfigError
from quartet.folders import remove
from quartet.ranks.group import RankGroup
from quartet.wire.errors import NotFinite
from tests.unit.fake_ranks import NEVER, FakeRank
from tests.unit.rank_processes import SpawnedRank
from tests.unit.runs_on_disk import printed
from tests.unit.training_runs import Runs, Stopped, measured, rows, same, stop, weights

Write = Callable[[str, list[dict[str, str]]], str]
STEPS = 5
"""Steps of 2 passes over 18 examples in batches of 8."""


@pytest.fixture(params=sorted(TRAININGS))
def command(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fields(command: str, policy_folder: Path, write: Write) -> dict[str, Any]:
    write("train", rows(command, 18))
    return {
        "name": "mine",
        "model": str(policy_folder),
        "data": {"path": write("eval", rows(command, 6, seed=1))},
        "optimizer": {"learning_rate": 1e-3, "schedule": "cosine"},
        "epochs": 2,
        "batch_size": 8,
        "evaluate_every": 2,
        "checkpoint": {"every": 2, "background": False},
        "log": {"tensorboard": False},
    }


def test_a_run_leaves_a_model_its_metrics_and_a_report(command: str, fields: dict[str, Any], runs: Runs) -> None:
    run = runs.run(command, fields)
    lines = measured(run)
    assert [line["step"] for line in lines] == [0, *range(1, STEPS + 1)]
    assert [line["step"] for line in lines if "eval/loss" in line] == [0, 2, 4, 5]
    assert all(line["eval/loss"] > 0 for line in lines if "eval/loss" in line)
    assert [line["train/epoch"] for line in lines[1:]] == pytest.approx([8 / 18, 16 / 18, 24 / 18, 32 / 18, 2])
    assert lines[1]["train/learning_rate"] == 1e-3 > lines[-1]["train/learning_rate"]
    assert (run / "model" / ".quartet").read_text() == TRAININGS[command].owner
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in (run / "model").iterdir()}
    assert f"step 5/5  loss {lines[-1]['train/loss']:.2f}  held-out" in runs.said
    page = write_report(run).read_text()
    assert all(text in page for text in ("held-out loss", "Step 5", "Loss", "Throughput"))
    assert ("Accuracy" in page) == (command == "reward-model")
    assert "held-out loss" in printed(run)


def test_a_run_that_was_ended_goes_on_bit_for_bit(command: str, fields: dict[str, Any], runs: Runs) -> None:
    whole = runs.run(command, fields)
    with pytest.raises(Stopped):
        runs.run(command, fields | {"name": "ended"}, after={3: stop})
    assert [line["step"] for line in measured(runs.folder / "runs/ended")] == [0, 1, 2, 3]
    ended = runs.run(command, fields | {"name": "ended"}, resume=True)
    assert "after step 2 of 5" in runs.said
    assert measured(ended) == measured(whole)
    assert same(weights(ended / "model"), weights(whole / "model"))


def test_a_folder_that_could_not_take_the_model_is_refused_before_an_earlier_run_is_replaced(
    command: str, fields: dict[str, Any], runs: Runs, tmp_path: Path
) -> None:
    run = runs.run(command, fields)
    before, foreign = measured(run), tmp_path / "mine"
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept
    foreign.mkdir()
    (foreign / "thesis.txt").touch()
    with pytest.raises(ConfigError, match=r"^save: .*/mine exists and Quartet did not write it "):
        runs.run(command, fields | {"save": str(foreign)}, overwrite=True)
    assert measured(run) == before
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == kept


def test_a_run_that_is_finished_is_not_trained_again(command: str, fields: dict[str, Any], runs: Runs) -> None:
    """Whatever its last step; with more passes it goes on from there."""
    fields |= {"checkpoint": {"every": 10}}
    run = runs.run(command, fields)
    before, lines = weights(run / "model"), measured(run)
    remove(run / "model")
    runs.run(command, fields, resume=True)
    assert f"is finished, at step {STEPS}" in runs.said
    assert "step 1/" not in runs.said
    assert measured(run) == lines
    assert same(weights(run / "model"), before)
    runs.run(command, fields | {"epochs": 3}, resume=True)
    assert f"resuming {run} after step {STEPS} of 7" in runs.said
    assert [line["step"] for line in measured(run)] == [*range(8)]
    assert measured(run)[: len(lines)] == lines


def test_a_run_without_checkpoints_is_not_begun_again_by_resuming(
    command: str, fields: dict[str, Any], runs: Runs
) -> None:
    run = runs.run(command, fields | {"checkpoint": {"every": 0}})
    before, lines = weights(run / "model"), measured(run)
    with pytest.raises(ConfigError, match=r"mine was trained, but .*/checkpoints holds no checkpoint: was .*every 0"):
        runs.run(command, fields | {"optimizer": {"learning_rate": 2e-3}}, resume=True)
    assert measured(run) == lines
    assert same(weights(run / "model"), before)


def test_other_examples_or_another_order_cannot_go_on(
    command: str, fields: dict[str, Any], runs: Runs, write: Write
) -> None:
    with pytest.raises(Stopped):
        runs.run(command, fields, after={3: stop})
    with pytest.raises(ConfigError, match=r"^batch_size: not what the checkpoint of step 2 was trained with"):
        runs.run(command, fields | {"batch_size": 6}, resume=True)
    log = (runs.folder / "runs" / "mine" / RUN_LOG).read_text().splitlines()
    assert "  ended by an error: batch_size: not what the checkpoint of step 2 was trained with" in log[-1]
    write("train", rows(command, 18, seed=2))
    with pytest.raises(ConfigError, match=r"^data: not what the checkpoint of step 2 was trained with"):
        runs.run(command, fields, resume=True)
    write("train", [{"prompt": "no example"}])  # is not read for what is refused anyway
    with pytest.raises(ConfigError, match="already holds"):
        runs.run(command, fields)


def test_a_run_without_examples_to_evaluate_on(fields: dict[str, Any], command: str, runs: Runs) -> None:
    data = f"{fields['data']['path']}/train.jsonl"
    run = runs.run(command, fields | {"data": data, "epochs": 1, "checkpoint": {"every": 0}})
    assert [line["step"] for line in measured(run)] == [1, 2, 3]
    assert not any(name.startswith("eval/") for line in measured(run) for name in line)
    assert (run / "model" / "config.json").exists()
    assert not (run / "checkpoints").exists()


DIVERGES = {"learning_rate": 1e15}


def test_of_a_model_that_has_diverged_no_figure_is_made(command: str, fields: dict[str, Any], runs: Runs) -> None:
    with pytest.raises(NotFinite, match=r"are not finite: it has diverged, .* a lower optimizer\.learning_rate$"):
        runs.run(command, fields | {"optimizer": DIVERGES})
    assert not (runs.folder / "runs" / "mine" / "model").exists()


@pytest.mark.parametrize("command", ["reward-model"], indirect=True)
def test_a_reward_is_not_normalised_by_what_is_no_number(command: str, fields: dict[str, Any], runs: Runs) -> None:
    data = f"{fields['data']['path']}/train.jsonl"  # nothing to evaluate on
    with pytest.raises(NotFinite, match="are not finite"):
        runs.run(command, fields | {"data": data, "optimizer": DIVERGES})
    assert not (runs.folder / "runs" / "mine" / "model").exists()


def test_nothing_is_loaded_before_all_examples_are_read(
    command: str, fields: dict[str, Any], runs: Runs, write: Write
) -> None:
    write("eval", [*rows(command, 2), {"prompt": "w5"}])
    with pytest.raises(ConfigError, match=r"eval\.jsonl, line 3: column '(response|chosen)' should hold text"):
        runs.run(command, fields, start=lambda training: pytest.fail("loaded"))
    assert not (runs.folder / "runs").exists()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"batchsize": 8}, "^batchsize: unknown field; .* did you mean batch_size?"),
        ({"optimizer": {"learning_rate": "1e-3"}}, r"^optimizer\.learning_rate: should be a number, got '1e-3'"),
        ({"model": "nowhere"}, "^model: no such folder on this machine"),
        ({"model": "org/name"}, r"^model: no such folder on this machine .* revision, such as org/name@main, got"),
        ({"data": {}}, r"^data\.path: required"),
        ({"max_length": 4096}, "^max_length: 4096, but .* takes 128 tokens at most"),
        ({"num_gpus": 1}, "num_gpus: for several ranks"),
        ({"env_vars": {"A": "b"}, "num_cpus": 2}, "env_vars, num_cpus: for several ranks"),
        ({"colocate": True, "zero_stage": 1}, "colocate gives memory to services"),
        (
            {"optimizer": {"learning_rate": 1e-3, "warmup_steps": 5, "schedule": "cosine"}},
            r"^optimizer\.warmup_steps: 5",
        ),
        ({"data": {"path": "nowhere.jsonl"}}, r"^data\.path: no such file or folder: nowhere\.jsonl"),
    ],
)
def test_a_wrong_field_is_named(
    wrong: dict[str, Any], said: str, command: str, fields: dict[str, Any], runs: Runs
) -> None:
    with pytest.raises(ConfigError, match=said):
        runs.run(command, fields | wrong)


def test_ranges_of_one_split_share_no_row(command: str, fields: dict[str, Any], runs: Runs) -> None:
    data = fields["data"] | {"prompt_split": "train[:90%]", "eval_split": "train[80%:]"}
    with pytest.raises(ConfigError, match=r"share 2 row\(s\) of 'train', row 14 for one"):
        runs.run(command, fields | {"data": data})


class TwoRanks:
    """Groups of two ranks in processes of their own, one for each start."""

    def __init__(self) -> None:
        self.started: list[list[SpawnedRank]] = []

    def start(self, training: Supervised) -> RankGroup:
        """Makes a group."""
        self.started.append([SpawnedRank(rank, training.ranks, 60) for rank in range(training.ranks)])
        return RankGroup("model", self.started[-1])

    def places(self) -> dict[str, Any]:
        """The places of a run's ranks."""
        return {"start": self.start, "connect": lambda _: nullcontext()}

    def lose(self) -> None:
        """Kills the second rank of the group that was started last."""
        self.started[-1][1].process.kill()


@pytest.mark.processes
def test_a_rank_that_is_lost_changes_nothing(command: str, fields: dict[str, Any], runs: Runs) -> None:
    one = runs.run(command, fields)
    fields |= {"ranks": 2, "zero_stage": 1, "micro_batch_tokens": 60}
    whole = runs.run(command, fields | {"name": "whole"}, **TwoRanks().places())
    two = TwoRanks()
    lost = runs.run(command, fields | {"name": "lost"}, after={3: two.lose}, **two.places())
    assert len(two.started) == 2
    assert "rank 1 of 2 died" in runs.said
    assert "resuming after step 2" in runs.said
    assert measured(lost) == measured(whole)
    assert same(weights(lost / "model"), weights(whole / "model"))
    expected = [line["train/loss"] for line in measured(one)[1:]]
    assert [line["train/loss"] for line in measured(whole)[1:]] == pytest.approx(expected, abs=1e-4)


class Stuck(FakeRank):
    """Starts, and answers nothing; cannot be ended."""

    def call(self, method: str, *arguments: Any, **options: Any) -> Awaitable[Any]:
        self.after_s = NEVER if method == "run" else 0
        return super().call(method, *arguments, **options)

    def kill(self) -> bool:
        super().kill()
        return False


def test_no_second_model_is_built_beside_a_thread_that_goes_on(
    command: str, fields: dict[str, Any], runs: Runs
) -> None:
    made: list[Stuck] = []

    def start(training: Supervised) -> RankGroup:
        made.append(Stuck())
        return RankGroup("model", made[-1:])

    said = r"no answer within 0.1 s from rank 0 of 1; .*raise rank_timeout_s \(0.1\) .* go on with --resume"
    with pytest.raises(ConfigError, match=said):
        runs.run(command, fields | {"rank_timeout_s": 0.1}, start=start, connect=lambda _: nullcontext())
    assert [rank.killed for rank in made] == [1]


@pytest.mark.parametrize("seed", [None, 3])
def test_each_pass_takes_every_example_once(seed: int | None) -> None:
    order = Order(count=7, epochs=3, batch_size=4, seed=seed)
    assert order.steps == 6
    taken = [index for step in range(order.steps) for index in order.taken(step)]
    passes = [taken[start : start + 7] for start in (0, 7, 14)]
    assert all(sorted(each) == list(range(7)) for each in passes)
    assert len(order.taken(5)) == 1
    assert (passes[0] == passes[1] == list(range(7))) == (seed is None)


def test_the_file_of_a_run_is_not_taken_for_one_of_a_training(tmp_path: Path) -> None:
    path = tmp_path / "ppo.yaml"
    path.write_text("{name: a, model: m, reward: a:b, prompts: {path: p}, algorithm: {kind: ppo}}")
    with pytest.raises(ConfigError) as caught:
        TrainingFile.load("sft", path)
    [line] = str(caught.value).splitlines()
    assert line.startswith(f"{path}: is a file of `quartet train`, as it has algorithm, prompts; `quartet sft` takes")


class FakePinned:
    """Folders of a hub."""

    def place(self, name: str, kind: str, where: str) -> str:
        """The folder that stands for a name."""
        assert where == {"model": "model", "dataset": "data.path"}[kind]
        return {"org/base@main": self.model, "org/chats@v1/main": "here/main"}[name]

    def __init__(self, model: Path) -> None:
        self.model = str(model)


def test_a_model_and_data_of_a_hub_are_fetched_and_kept_by_their_names(
    command: str, policy_folder: Path, tmp_path: Path
) -> None:
    text = "name: a\nmodel: org/base@main\ndata: {path: org/chats@v1/main}\noptimizer: {learning_rate: 0.1}\n"
    (tmp_path / "a.yaml").write_text(text)
    file = TrainingFile.load(command, tmp_path / "a.yaml", FakePinned(policy_folder))  # type: ignore[arg-type]
    assert (file.training.model, file.training.data.path) == (str(policy_folder), "here/main")
    assert (file.record["model"], file.record["data"]["path"]) == ("org/base@main", "org/chats@v1/main")
