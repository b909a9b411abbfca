"""A learner that goes on from a snapshot ends bit for bit where one ends that was never stopped."""

import os
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from orchestrator.algorithms.ppo import PPO
from orchestrator.policy.trainer import PolicyTrainer
from quartet.config.learner import LoraConfig, PolicyConfig
from quartet.learner.snapshot import Snapshot
from quartet.models.distribution import Distribution
from quartet.ranks.group import RankGroup
from quartet.wire.errors import InvalidArgument
from tests import trajectories
from tests.plain import furthest
from tests.unit.layouts import BY_LAYERS, OPTIMIZER, STAGES, TIMEOUT_S, Bench
from tests.unit.rows import noise, pairs

pytestmark = pytest.mark.processes

LAYOUTS: dict[str, dict[str, Any]] = {
    **STAGES,
    "bfloat16": {"zero_stage": 1, "dtype": "bfloat16"},
    "running mean": {"ema_decay": 0.9},
    "running mean, zero 3": {"ema_decay": 0.9} | BY_LAYERS,
    "frozen attention, zero 1": {"freeze_attention": True, "zero_stage": 1},
    "adapters": {"lora": LoraConfig(rank=4)},
    "adapters, zero 3": {"lora": LoraConfig(rank=4)} | BY_LAYERS,
    "adam offload": {"adam_offload": True, "zero_stage": 2},
    "both offloads": {"adam_offload": True, "param_offload": True} | BY_LAYERS,
}


MORE = pytest.mark.exhaustive
# Every kind of state once; the rest is one more number of ranks, or one more stage of ZeRO.
ALWAYS = {("zero 0", 1), ("zero 2", 2), ("bfloat16", 2), ("running mean, zero 3", 2), ("adapters, zero 3", 1)}
ALWAYS |= {("both offloads", 2), ("frozen attention, zero 1", 1)}


def layout_cases(names: Collection[str], always: Collection[tuple[str, int]]) -> list[Any]:
    return [
        pytest.param(name, ranks, marks=() if (name, ranks) in always else MORE) for name in names for ranks in (1, 2)
    ]


@pytest.mark.parametrize(("name", "ranks"), layout_cases(LAYOUTS, ALWAYS))
async def test_it_goes_on_bit_for_bit(benches: dict[int, RankGroup], tmp_path: Path, name: str, ranks: int) -> None:
    layout = LAYOUTS[name] | {"ranks": ranks}
    for which in ("policy", "critic"):
        straight, again = await benches[ranks].call(Bench.resumed, TIMEOUT_S, layout, tmp_path, which)
        assert again["steps"] == straight["steps"]
        assert furthest(again["weights"], straight["weights"]) == 0
        assert len(straight["averages"]) == len(again["averages"])
        assert all((a == b).all() for a, b in zip(again["averages"], straight["averages"], strict=True))
        assert bool(straight["averages"]) == ("ema_decay" in layout)


WRITTEN_AT_ONCE = ("zero 0", "zero 2", "zero 3", "both offloads", "running mean, zero 3")


@pytest.mark.parametrize(("name", "ranks"), layout_cases(WRITTEN_AT_ONCE, {("running mean, zero 3", 2)}))
async def test_it_does_without_copies_too(
    benches: dict[int, RankGroup], tmp_path: Path, name: str, ranks: int
) -> None:
    layout = LAYOUTS[name] | {"ranks": ranks}
    straight, again = await benches[ranks].call(Bench.resumed, TIMEOUT_S, layout, tmp_path, "policy", False)
    assert again["steps"] == straight["steps"]
    assert furthest(again["weights"], straight["weights"]) == 0


def make_policy(folder: Path, **layout: Any) -> PolicyTrainer:
    config = PolicyConfig(model=str(folder), optimizer=OPTIMIZER, **layout)
    return PolicyTrainer(config, PPO(epochs=1, minibatch_size=5), Distribution(1.0))


@pytest.fixture
def snapshot(policy_folder: Path, tmp_path: Path) -> Path:
    """Folder with a snapshot of the untrained policy."""
    trainer = make_policy(policy_folder)
    trainer.learner.take_snapshot(tmp_path / "policy", 0)
    trainer.learner.write_snapshot()
    return tmp_path / "policy"


def test_the_snapshot_of_a_policy_holds_a_model_that_transformers_loads(policy_folder: Path, snapshot: Path) -> None:
    exported = AutoModelForCausalLM.from_pretrained(snapshot / "model")
    AutoTokenizer.from_pretrained(snapshot / "model")
    prompts, responses = pairs(1)
    ids = torch.tensor([[*prompts[0], *responses[0]]])
    wanted = AutoModelForCausalLM.from_pretrained(policy_folder)(ids).logits
    assert (exported(ids).logits - wanted).abs().max() == 0


def test_another_layout_is_refused_by_name(policy_folder: Path, snapshot: Path) -> None:
    other = make_policy(policy_folder, zero_stage=1, ema_decay=0.5)
    with pytest.raises(InvalidArgument, match=r"zero_stage: 0 in the checkpoint, 1 here; ema: False .*, True here"):
        other.learner.restore(snapshot)
    with pytest.raises(InvalidArgument, match="does not hold a checkpoint"):
        other.learner.restore(snapshot.parent / "nothing")


def test_the_optimizer_goes_on_as_it_is_configured_now(policy_folder: Path, snapshot: Path) -> None:
    own = {"learning_rate": 4e-3, "weight_decay": 0.5, "eps": 1e-5, "betas": (0.7, 0.8)}
    changed = OPTIMIZER.model_copy(update=own)
    config = PolicyConfig(model=str(policy_folder), optimizer=changed)
    trainer = PolicyTrainer(config, PPO(epochs=1, minibatch_size=5), Distribution(1.0))
    trainer.learner.restore(snapshot)
    [group] = trainer.learner._engine.optimizer.param_groups
    assert group["lr"] == pytest.approx(4e-3 / 3)
    assert (group["weight_decay"], group["eps"], group["betas"]) == (0.5, 1e-5, (0.7, 0.8))
    # One third of the rate, and two, in the two steps of warm-up, and then all of it.
    prompts, responses = pairs(5)
    rows = {name: noise(responses, 1) for name in ("logprobs", "old_logprobs", "advantages")}
    batch = trajectories.of(prompts, responses, **rows)
    rates = [trainer.train(batch, 0.0, seed=1)["learning_rate"] for _ in range(3)]
    assert rates == pytest.approx([4e-3 / 3, 8e-3 / 3, 4e-3])


def test_random_numbers_go_on_where_they_were(policy_folder: Path, tmp_path: Path) -> None:
    trainer = make_policy(policy_folder)
    torch.manual_seed(3)
    trainer.learner.take_snapshot(tmp_path / "policy", 0)
    trainer.learner.write_snapshot()
    expected = torch.rand(4)
    torch.manual_seed(5)
    trainer.learner.restore(tmp_path / "policy")
    assert torch.equal(torch.rand(4), expected)


def test_a_file_that_was_cut_short_is_refused(policy_folder: Path, snapshot: Path) -> None:
    file = snapshot / "rank-0.pt"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InvalidArgument, match=r"rank-0.pt is not a complete part of a checkpoint"):
        make_policy(policy_folder).learner.restore(snapshot)


class Payload:
    """An object whose unpickling would run code."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("run-by-unpickling"),))


def test_a_file_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weights": Payload()}, tmp_path / "evil.pt")
    with pytest.raises(InvalidArgument, match=r"evil.pt is not a complete part"):
        Snapshot().load(str(tmp_path / "evil.pt"))
    assert not (tmp_path / "run-by-unpickling").exists()


def test_what_is_written_is_the_state_as_it_was_copied(tmp_path: Path) -> None:
    snapshot, weight = Snapshot(), torch.arange(4.0)
    snapshot.begin()
    snapshot.save({"a": weight, "tied": weight, "shape": weight.shape, "rows": [weight[:2], 3]}, str(tmp_path / "x"))
    weight.zero_()
    snapshot.write()
    actual = snapshot.load(str(tmp_path / "x"))
    assert actual["a"].tolist() == [0, 1, 2, 3]
    assert actual["rows"][0].tolist() == [0, 1]
    assert actual["rows"][1] == 3
    assert actual["tied"].data_ptr() == actual["a"].data_ptr()
    assert actual["shape"] == torch.Size([4])


def test_without_copies_everything_is_written_at_once(tmp_path: Path) -> None:
    snapshot, weight = Snapshot(), torch.arange(4.0)
    snapshot.begin(copies=False)
    snapshot.save({"a": weight}, str(tmp_path / "x"))
    weight.zero_()
    assert snapshot.load(str(tmp_path / "x"))["a"].tolist() == [0, 1, 2, 3]
    snapshot.write()
    assert snapshot.load(str(tmp_path / "x"))["a"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("copies", [True, False])
def test_all_files_of_a_snapshot_are_on_disk_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: bool
) -> None:
    synced = list[int]()
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))

    def write(state: None, folder: Path) -> None:
        (folder / "adapters").mkdir(parents=True)
        for file in (folder / "config.json", folder / "adapters" / "weights"):
            file.write_text("{}")

    snapshot = Snapshot()
    snapshot.begin(copies=copies)
    snapshot.save({"a": torch.arange(4.0)}, str(tmp_path / "x"))
    snapshot.hold(None, tmp_path / "model", write)
    snapshot.write()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) == 3
    assert sorted(synced) == sorted(file.stat().st_ino for file in files)


def test_the_next_snapshot_waits_until_the_last_is_written(tmp_path: Path) -> None:
    snapshot, weight = Snapshot(), torch.arange(4.0)
    writes, may_go_on = threading.Event(), threading.Event()

    def write(state: torch.Tensor, path: Path) -> None:
        writes.set()
        assert may_go_on.wait(60)
        path.write_text(str(state.tolist()))

    def take() -> None:
        snapshot.begin()
        snapshot.copy(weight + 10)  # into the memory of the last one

    snapshot.begin()
    snapshot.hold(snapshot.copy(weight), tmp_path / "x", write)
    writing, taking = threading.Thread(target=snapshot.write), threading.Thread(target=take)
    writing.start()
    assert writes.wait(60)
    taking.start()
    taking.join(0.2)
    assert taking.is_alive()
    may_go_on.set()
    for thread in (writing, taking):
        thread.join(60)
        assert not thread.is_alive()
    assert (tmp_path / "x").read_text() == "[0.0, 1.0, 2.0, 3.0]"


def test_memory_is_kept_for_the_next_snapshot() -> None:
    snapshot, weight = Snapshot(), torch.arange(4.0)
    places = []
    for _ in range(3):
        snapshot.begin()
        places.append((snapshot.copy(weight).data_ptr(), snapshot.copy(weight).data_ptr()))
    assert places[0][0] != places[0][1]
    assert {*places[0]} == {*places[1]} == {*places[2]}
