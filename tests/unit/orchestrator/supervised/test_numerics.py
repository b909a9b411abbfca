"""The numbers of both trainings against plain transformers and torch, and their division into passes and ranks."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from orchestrator.commands.supervised import Order, read_inputs
from orchestrator.supervised.contract import Supervised
from orchestrator.supervised.ranks import SupervisedModel, ranks_of
from orchestrator.supervised.registry import TRAININGS
from quartet.columns import Columns
from quartet.learner.objective import Micro
from quartet.learner.shards import Pass, shards
from quartet.learner.trainer import Schedule, Trainer
from quartet.models.loading import load_tokenizer
from quartet.models.sequences import PairTensors, length_batches, packed_batches, pair_tensors
from quartet.wire.codec import Floats, Ints
from quartet.wire.pairs import Pair
from services.reward.config import ModelScorerConfig
from services.reward.scorers.model import ModelScorer
from services.reward.scorers.scorer import EncodedPair
from tests.models import EOS, PAD
from tests.unit.training_runs import Runs, measured, rows

Write = Callable[[str, Sequence[object]], str]
CPU = torch.device("cpu")
RATE, STEPS, SIZE = 3e-4, 20, 4


class PlainLearner:
    """One rank's share of a module without DeepSpeed: it adds up gradients in the module's own arithmetic."""

    skipped_in_a_row = 0

    def __init__(self, module: Any, *, tokens: int, packing: bool, rank: int, count: int) -> None:
        self.model, self.optimizer_state = module, self
        self._tokens, self._packing, self._rank, self._count = tokens, packing, rank, count

    @contextmanager
    def resident(self) -> Iterator[None]:
        yield

    def passes(self, prompts: Sequence[Ints], responses: Sequence[Ints], *, group: int = 1) -> list[Pass]:
        batches = packed_batches if self._packing else length_batches
        options = {"max_tokens": self._tokens, "world_size": self._count, "group": group}
        return shards(prompts, responses, batches, **options)[self._rank]  # type: ignore[arg-type]

    def tensors(self, trajectories: Columns, *, last: bool = False) -> PairTensors:
        return pair_tensors(trajectories, CPU, packing=self._packing, last=last)

    def step(
        self, micros: Sequence[Micro], loss: Callable[[Micro], tuple[Tensor, Mapping[str, Tensor]]]
    ) -> dict[str, float]:
        total = 0.0
        for micro in micros:
            own, _ = loss(micro)
            own.backward()
            total += float(own.detach())
        return {"loss": total}

    def check_weights(self) -> None:
        """Nothing has changed."""


@pytest.fixture
def training(policy_folder: Path, reward_folder: Path, write: Write) -> Callable[..., Supervised]:
    def made(command: str, count: int = 12, **fields: Any) -> Supervised:
        drawn = [row | {"by": index / count} for index, row in enumerate(rows(command, count))]
        path = write(command, drawn)
        model = {"sft": policy_folder, "reward-model": reward_folder}[command]
        own = {"name": "a", "model": str(model), "optimizer": {"learning_rate": RATE}, "shuffle": False}
        data = {"path": path, "prompt_split": command} | ({"margin_key": "by"} if command == "reward-model" else {})
        return TRAININGS[command].parse(own | {"data": data} | fields, "")

    return made


def gradient(training: Supervised, batch: Columns, tokens: int, ranks: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of one step in float64, summed over all ranks."""
    module = training.load().double()
    losses = []
    for rank in range(ranks):
        learner = PlainLearner(module, tokens=tokens, packing=training.packing, rank=rank, count=ranks)
        trainer = Trainer(learner)  # type: ignore[arg-type]
        losses.append(trainer.train(batch, training.objective(), Schedule(1, len(batch), 0))["loss"])
    return sum(losses), {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        ("sft", {}),
        ("sft", {"reduction": "trajectories"}),
        ("sft", {"reduction": 16}),
        ("reward-model", {"centring": 0.1}),
    ],
)
def test_any_division_into_passes_and_ranks_has_the_same_gradient(
    command: str, fields: dict[str, Any], training: Callable[..., Supervised]
) -> None:
    own = training(command, **fields)
    batch = read_inputs(own).train.columns
    loss, whole = gradient(own, batch, 1 << 20, 1)
    for packing in (False, True):
        for tokens, ranks in ((1, 1), (48, 1), (100, 2), (1 << 20, 3)):
            other, divided = gradient(own.model_copy(update={"packing": packing}), batch, tokens, ranks)
            assert other == pytest.approx(loss, abs=1e-9)
            assert divided.keys() == whole.keys()
            for name, expected in whole.items():
                assert (divided[name] - expected).abs().max() < 1e-6 * max(1.0, float(expected.abs().max())), name


def padded(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """[B, T] ids padded on the right, and their mask."""
    wide = max(map(len, sequences))
    ids = torch.tensor([[*row, *[PAD] * (wide - len(row))] for row in sequences])
    return ids, torch.tensor([[1] * len(row) + [0] * (wide - len(row)) for row in sequences])


def batches(own: Supervised) -> list[Columns]:
    train = read_inputs(own).train
    order = Order(len(train), 1, own.batch_size, None)
    return [train.take(order.taken(step)) for step in range(order.steps)]


def sft_loss(model: Any, batch: Columns) -> Tensor:
    """Transformers' own loss with labels, in one padded batch: the mean over all answers' tokens."""
    ids, mask = padded([row.tolist() for row in batch.rows("ids")])
    marks, _ = padded([row.tolist() for row in batch.rows("sampled")])
    loss: Tensor = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(marks == 0, -100)).loss
    return loss


def trl_loss(model: Any, batch: Columns, centring: float) -> Tensor:
    """The loss of TRL's RewardTrainer.compute_loss (trl/trainer/reward_trainer.py): chosen answers in one half of a
    padded batch and rejected ones in the other, scored by transformers' sequence classification."""
    sequences = [row.tolist() for row in batch.rows("ids")]
    ids, mask = padded([*sequences[::2], *sequences[1::2]])
    chosen, rejected = torch.chunk(model(input_ids=ids, attention_mask=mask).logits.squeeze(-1), chunks=2)
    margin = torch.from_numpy(batch["margin"][::2])
    loss = -functional.logsigmoid(chosen - rejected - margin).mean()
    return loss + centring * torch.mean((chosen + rejected) ** 2)


@pytest.mark.parametrize("options", [{}, {"packing": True, "micro_batch_tokens": 60}])
@pytest.mark.parametrize("command", sorted(TRAININGS))
def test_twenty_steps_are_those_of_transformers_and_torch(
    command: str, options: dict[str, Any], training: Callable[..., Supervised], runs: Runs
) -> None:
    centring = {"centring": 0.01} if command == "reward-model" else {}
    fields: dict[str, Any] = {"batch_size": SIZE, "checkpoint": {"every": 0}, "log": {"tensorboard": False}}
    own = training(command, STEPS * SIZE, **fields, **centring, **options)
    kind: Any = {"sft": AutoModelForCausalLM, "reward-model": AutoModelForSequenceClassification}[command]
    model = kind.from_pretrained(own.model, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for batch in batches(own):
        loss = sft_loss(model, batch) if command == "sft" else trl_loss(model, batch, 0.01)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    run = runs.run(command, own.model_dump(mode="json", exclude_unset=True))
    assert len(losses) == STEPS
    assert [line["train/loss"] for line in measured(run)] == pytest.approx(losses, abs=1e-5)
    assert losses[0] - losses[-1] != pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("packing", [False, True])
def test_the_reward_service_scores_as_the_trainer_did(
    packing: bool, training: Callable[..., Supervised], policy_folder: Path, tmp_path: Path
) -> None:
    own = training("reward-model", model=str(policy_folder), packing=packing, micro_batch_tokens=100)
    examples = read_inputs(own).train
    saved = tmp_path / "reward"

    async def trained() -> Floats:
        model = SupervisedModel(ranks_of(own), own)
        await model.start()
        for seed in range(3):
            await model.train(examples.columns, seed)
        outputs = await model.outputs(examples.columns)
        await model.describe(own.described(examples.columns, outputs))
        await model.save(saved)
        model.close()
        return outputs[np.cumsum(examples.columns.counts) - 1]

    raw = asyncio.run(trained())
    config = ModelScorerConfig(kind="model", model=str(saved))
    scorer = ModelScorer(config, load_tokenizer(str(policy_folder)), CPU)
    both = zip(examples.columns.prompts, examples.columns.responses, strict=True)
    scores = scorer.score([EncodedPair(prompt, response, Pair("", "")) for prompt, response in both])
    assert np.asarray(scores)[:, 0] == pytest.approx((raw - raw.mean()) / raw.std(ddof=1), abs=1e-4)
    assert all(int(row[-1]) == EOS for row in examples.columns.responses)


@pytest.mark.parametrize("layout", [{}, {"zero_stage": 3}], ids=str)
def test_the_model_that_is_saved_is_the_one_that_is_evaluated(
    layout: dict[str, Any], training: Callable[..., Supervised], tmp_path: Path
) -> None:
    own = training("reward-model", ema_decay=0.5, **layout)
    examples = read_inputs(own).train.columns

    async def trained(folder: Path, *, evaluate: bool) -> Floats:
        model = SupervisedModel(ranks_of(own), own)
        await model.start()
        for seed in range(4):
            await model.train(examples, seed)
            outputs = await model.outputs(examples) if evaluate or seed == 3 else None
        await model.save(folder)
        model.close()
        assert outputs is not None
        return outputs

    async def again() -> Floats:
        model = SupervisedModel(ranks_of(own), own.model_copy(update={"model": str(tmp_path / "often")}))
        await model.start()
        outputs = await model.outputs(examples)
        model.close()
        return outputs

    outputs = asyncio.run(trained(tmp_path / "often", evaluate=True))
    assert asyncio.run(again()) == pytest.approx(outputs, abs=1e-6)
    assert np.array_equal(asyncio.run(trained(tmp_path / "once", evaluate=False)), outputs)


def test_a_reward_model_begins_with_a_whole_body_and_only_the_head_is_new(
    training: Callable[..., Supervised], policy_folder: Path, reward_folder: Path
) -> None:
    fresh: Any = training("reward-model", model=str(policy_folder)).load()
    policy = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    body = policy.model.state_dict()
    assert all(torch.equal(weight, body[name]) for name, weight in fresh.body.state_dict().items())
    assert fresh.head.weight.shape == (1, 64)
    known: Any = training("reward-model").load()
    held = AutoModelForSequenceClassification.from_pretrained(reward_folder, dtype=torch.float32)
    assert torch.equal(known.head.weight, held.score.weight)
