"""DeepSpeed's optimizer step against plain PyTorch's."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from quartet.config.learner import LearnerConfig, OptimizerConfig
from quartet.learner import module
from quartet.learner.learner import RankLearner, write_pretrained
from quartet.learner.optimizer import rate_factor
from quartet.wire.errors import InvalidArgument

OPTIMIZER = OptimizerConfig(
    learning_rate=0.05,
    betas=(0.8, 0.95),
    eps=1e-6,
    weight_decay=0.1,
    warmup_steps=1,
    schedule="cosine",
    total_steps=4,
    max_grad_norm=0.2,
)
Micro = tuple[Tensor, Tensor]
Weights = dict[str, Tensor]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(count: int) -> list[Micro]:
    draw = torch.Generator().manual_seed(1)
    made = [torch.randn(6, 3, generator=draw) for _ in range(count)]
    return [(x, x.sum(1, keepdim=True).sin() + 2) for x in made]


def parts(batch: Micro, *sizes: int) -> list[Micro]:
    return list(zip(batch[0].split(sizes), batch[1].split(sizes), strict=True))


def squared_error(model: Callable[[Tensor], Tensor]) -> Callable[[Micro], tuple[Tensor, dict[str, Tensor]]]:
    """Mean over the six rows of a minibatch, given in any parts."""

    def loss(micro: Micro) -> tuple[Tensor, dict[str, Tensor]]:
        x, target = micro
        error = (model(x).float() - target).square()
        value = error.sum() / 6
        return value, {"loss": value, "error_max": error.max()}

    return loss


def make_learner(
    folder: Path,
    optimizer: OptimizerConfig = OPTIMIZER,
    *,
    write: Callable[[nn.Module, Path, Weights], None] = write_pretrained,
    exported: bool = False,
    **options: Any,
) -> RankLearner:
    config = LearnerConfig(model=str(folder), optimizer=optimizer, **options)
    return RankLearner(network(), config, write=write, exported=exported)


def train(learner: RankLearner, minibatches: Sequence[Sequence[Micro]]) -> list[dict[str, float]]:
    return [learner.step(micro_batches, squared_error(learner.model)) for micro_batches in minibatches]


def weights(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().float().view(-1) for parameter in module.parameters()])


def train_plainly(
    minibatches: Sequence[Micro], config: OptimizerConfig = OPTIMIZER
) -> tuple[nn.Module, list[dict[str, float]]]:
    module = network()
    optimizer = torch.optim.AdamW(
        module.parameters(),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    schedule = LambdaLR(optimizer, lambda step: rate_factor(step, config))
    measured = []
    for minibatch in minibatches:
        loss, metrics = squared_error(module)(minibatch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), config.max_grad_norm)
        rate = schedule.get_last_lr()[0]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        numbers = {name: float(metric.detach()) for name, metric in metrics.items()}
        measured.append(numbers | {"grad_norm": float(norm), "learning_rate": rate})
    return module, measured


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_three_steps_equal_plain_adamw_with_clipping_and_schedule(policy_folder: Path, zero_stage: int) -> None:
    plain, expected = train_plainly(batches(3))
    learner = make_learner(policy_folder, zero_stage=zero_stage)
    measured = train(learner, [[batch] for batch in batches(3)])
    # Rates by hand: warm-up 1/2, then 0.1 + 0.9 * (1 + cos(pi * k / 3)) / 2 for k = 0 and 1.
    assert [numbers["learning_rate"] for numbers in measured] == pytest.approx([0.025, 0.05, 0.05 * 0.775])
    assert min(numbers["grad_norm"] for numbers in expected) > OPTIMIZER.max_grad_norm
    for actual, wanted in zip(measured, expected, strict=True):
        assert actual == pytest.approx(wanted, abs=1e-6)
    assert float((weights(learner.module) - weights(plain)).abs().max()) < 1e-6
    assert float((weights(network()) - weights(plain)).abs().max()) > 0.01


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_minibatch_in_parts_is_the_same_step(policy_folder: Path, zero_stage: int) -> None:
    whole, split = (make_learner(policy_folder, zero_stage=zero_stage) for _ in range(2))
    expected = train(whole, [[batch] for batch in batches(3)])
    measured = train(split, [parts(batch, 3, 2, 1) for batch in batches(3)])
    for actual, wanted in zip(measured, expected, strict=True):
        assert actual == pytest.approx(wanted, abs=1e-6)
    assert float((weights(split.module) - weights(whole.module)).abs().max()) < 1e-6


@pytest.mark.parametrize("zero_stage", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_groups_of_parameters_train_as_one_bit_for_bit(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, zero_stage: int
) -> None:
    """With clipping, weight decay and a schedule, of weights of 24, 8, 8 and 1 numbers."""
    of_one: dict[str, Any] = {}
    several: dict[str, Any] = {}
    for trained, most, count in ((of_one, 100, 1), (several, 9, 3)):
        monkeypatch.setattr(module, "GROUP_ELEMENTS", most)
        learner = make_learner(policy_folder, zero_stage=zero_stage, dtype=dtype)
        cast = next(learner.module.parameters()).dtype
        steps = [[(x.to(cast), target) for x, target in parts(batch, 2, 4)] for batch in batches(3)]
        trained["metrics"] = train(learner, steps)
        optimizer = learner._engine.optimizer
        assert len(optimizer.param_groups) == count
        trained["weights"] = weights(learner.module)
        trained["masters"] = _without_padding(optimizer, optimizer.single_partition_of_fp32_groups)
        moments = [optimizer.optimizer.state[master] for master in optimizer.single_partition_of_fp32_groups]
        for name in ("exp_avg", "exp_avg_sq"):
            trained[name] = _without_padding(optimizer, [state[name] for state in moments])
    assert of_one.pop("metrics") == several.pop("metrics")
    assert all(torch.equal(of_one[name], several[name]) for name in of_one)


def _without_padding(optimizer: Any, tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(optimizer._get_groups_without_padding(tensors)).detach()


def test_metrics_are_summed_and_maxima_kept(policy_folder: Path) -> None:
    learner = make_learner(policy_folder)
    before = copy.deepcopy(learner.module)
    with torch.no_grad():
        errors = squared_error(before)(batches(1)[0])[1]
    measured = train(learner, [parts(batches(1)[0], 1, 5)])[0]
    assert measured["loss"] == pytest.approx(float(errors["loss"]), abs=1e-6)
    assert measured["error_max"] == pytest.approx(float(errors["error_max"]), abs=1e-6)


def test_bfloat16_keeps_float32_master_weights(policy_folder: Path) -> None:
    # Thirty steps of 1e-4 are 3e-3 in all. Near 0.3 neighbours in bfloat16 lie 2e-3 apart, so that without
    # master weights each step would be rounded away.
    config = OptimizerConfig(learning_rate=1e-4)
    plain, expected = train_plainly(batches(1) * 30, config)
    learner = make_learner(policy_folder, config, dtype="bfloat16", zero_stage=1)
    assert {parameter.dtype for parameter in learner.module.parameters()} == {torch.bfloat16}
    measured = train(learner, [[(x.bfloat16(), target)] for x, target in batches(1) * 30])
    for actual, wanted in zip(measured, expected, strict=True):
        assert actual == pytest.approx(wanted, rel=0.02)
    moved = weights(plain) - weights(network())
    assert 2e-3 < float(moved.abs().mean()) < 3e-3
    along = (weights(learner.module) - weights(network())) * moved.sign()
    assert float(along.mean()) == pytest.approx(float(moved.abs().mean()), rel=0.1)


def test_a_model_is_seen_whole_or_not_at_all(policy_folder: Path, tmp_path: Path) -> None:
    names = ["first", "half", "second"]
    target = tmp_path / "deep" / "model"

    def write(module: nn.Module, folder: Path, weights: Weights) -> None:
        name = names.pop(0)
        assert weights.keys() == dict(module.named_parameters()).keys()
        assert folder.parent == target.parent
        (folder / name).touch()
        if name == "half":
            raise OSError("disk full")

    learner = make_learner(policy_folder, write=write)
    learner.save(target)
    with pytest.raises(OSError, match="disk full"):
        learner.save(target)
    written = {path.name for path in target.iterdir()}
    assert written >= {".quartet", "first", "tokenizer.json"}
    learner.save(target)
    assert {path.name for path in target.iterdir()} == written - {"first"} | {"second"}
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_what_is_not_a_model_is_never_replaced(policy_folder: Path, tmp_path: Path) -> None:
    learner = make_learner(policy_folder, write=lambda module, folder, weights: (folder / "config.json").touch())
    (tmp_path / "thesis.txt").touch()
    for path in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(InvalidArgument, match="exists and Quartet did not write it"):
            learner.save(path)
    assert (tmp_path / "thesis.txt").is_file()
    (tmp_path / "empty").mkdir()
    learner.save(tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_resumed_learner_clips_as_it_is_configured(policy_folder: Path, tmp_path: Path, zero_stage: int) -> None:
    """With ZeRO, whose files hold the norm of the learner that wrote them, which clipped nothing."""
    before = make_learner(policy_folder, OPTIMIZER.model_copy(update={"max_grad_norm": 1e9}), zero_stage=zero_stage)
    before.take_snapshot(tmp_path / "begin", 0, copies=False)
    learner = make_learner(policy_folder, zero_stage=zero_stage)
    assert learner.restore(tmp_path / "begin") == 0
    train(learner, [[batch] for batch in batches(3)])
    plain, measured = train_plainly(batches(3))
    assert min(numbers["grad_norm"] for numbers in measured) > OPTIMIZER.max_grad_norm
    assert float((weights(learner.module) - weights(plain)).abs().max()) < 1e-6


@pytest.mark.parametrize(("before", "now"), [(False, True), (True, False)])
def test_adam_is_offloaded_from_a_checkpoint_on_if_its_state_is_in_one_group(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool, now: bool
) -> None:
    """The network has 41 parameters, in groups of 41 and of 40."""
    for most in (41, 40):
        monkeypatch.setattr(module, "GROUP_ELEMENTS", most)
        folder, first = tmp_path / str(most), make_learner(policy_folder, zero_stage=1, adam_offload=before)
        train(first, [batches(1)])
        first.take_snapshot(folder, 1, copies=False)
        second = make_learner(policy_folder, zero_stage=1, adam_offload=now)
        if most == 40:
            with pytest.raises(InvalidArgument, match=rf"adam_offload: {before} in the checkpoint, {now} here"):
                second.restore(folder)
            continue
        second.restore(folder)
        for learner in (first, second):
            train(learner, [batches(1)])
        assert float((weights(second.module) - weights(first.module)).abs().max()) < 1e-6


@pytest.mark.parametrize("copies", [True, False])
def test_the_model_of_a_snapshot_is_the_running_mean(policy_folder: Path, tmp_path: Path, copies: bool) -> None:
    written: dict[str, Tensor] = {}

    def write(module: nn.Module, folder: Path, tensors: Weights) -> None:
        written.update({name: tensor.clone() for name, tensor in tensors.items()})

    learner = make_learner(policy_folder, write=write, exported=True, ema_decay=0.75)
    start = weights(learner.module)
    train(learner, [batches(1)])
    learner.take_snapshot(tmp_path / "snapshot", 1, copies=copies)
    learner.write_snapshot()
    mean = torch.cat([written[name].view(-1) for name, _ in learner.module.named_parameters()])
    now = weights(learner.module)
    assert float((mean - (0.75 * start + 0.25 * now)).abs().max()) < 1e-6
    assert float((now - start).abs().min()) > 1e-3
