"""Comparison of a critic's starting points: its explained variance over the first PPO steps.

    python -m benchmarks.critic_init [--models models/reviews] [--seeds 3]

Critics with the settings of deploy/ppo.yaml and a new head each: on the body of the reward model, on the policy's,
and on one of random weights. All see the same batches, sampled from the demo's policy and scored by its reward model,
which `python -m recipes.reviews` makes. The policy does not move, so the KL to the reference is zero and the reward
is the score at the last token. Explained variance is measured on held-out responses against that score, which with
gamma = 1 is the return at every token, so that critics are measured by the same thing whatever they believe.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModel

from orchestrator.algorithm.advantages import gae
from orchestrator.algorithm.rewards import shape_rewards
from quartet.config.learner import OptimizerConfig
from quartet.models.loading import load_causal, load_config, load_tokenizer
from quartet.models.numerics import explained_variance, response_mask
from quartet.models.sequences import pad_rows
from quartet.wire.codec import Floats, Ints
from recipes.common.sampling import sample
from services.critic.config import CriticConfig
from services.critic.trainer import CriticBatch, CriticTrainer
from services.reward.config import ModelScorerConfig
from services.reward.scorers.model import ModelScorer
from services.reward.scorers.scorer import Scored

BATCH, HELD_OUT, EPOCHS, MINIBATCH, RATE = 128, 512, 2, 32, 1e-3
GAMMA, GAE_LAMBDA, SCORE_CLIP = 1.0, 0.95, 10.0
MAX_NEW_TOKENS = 32
AT = (0, 1, 2, 5, 10)
"""PPO steps trained when the critic is measured."""

console = Console(width=110)


@dataclass(frozen=True, slots=True)
class Experience:
    """B responses and their scores."""

    prompts: list[Ints]
    """[P]"""
    responses: list[Ints]
    """[T]"""
    scores: Floats
    """[B] float32"""

    @property
    def mask(self) -> torch.Tensor:
        """[B, T], True at response tokens."""
        lengths = torch.tensor([len(response) for response in self.responses])
        return response_mask(lengths, int(lengths.max()))


class Sampler:
    """The policy and the reward model of a recipe's folder."""

    def __init__(self, models: Path) -> None:
        self._tokenizer = load_tokenizer(str(models / "policy"))
        self._policy = load_causal(str(models / "policy"), "float32").eval()
        config = ModelScorerConfig(kind="model", model=str(models / "reward"), dtype="float32")
        self._scorer = ModelScorer(config, self._tokenizer, torch.device("cpu"))

    def draw(self, prompts: Sequence[str]) -> Experience:
        """One response to each, by torch's generator."""
        drawn = sample(self._policy, self._tokenizer, prompts, MAX_NEW_TOKENS)  # type: ignore[arg-type]
        pairs = [
            Scored(np.asarray(s.prompt_ids, np.int32), np.asarray(s.response_ids, np.int32), s.pair) for s in drawn
        ]
        scores = np.clip(self._scorer.score(pairs), -SCORE_CLIP, SCORE_CLIP)
        return Experience([pair.prompt_ids for pair in pairs], [pair.response_ids for pair in pairs], scores)


def explained(body: Path, batches: Sequence[Experience], held_out: Experience, seed: int) -> list[float]:
    """Explained variance on `held_out` before the first of `batches` and after each, from a new head on `body`."""
    config = CriticConfig(model=str(body), optimizer=OptimizerConfig(learning_rate=RATE), seed=seed)
    critic = CriticTrainer(config)
    measured = [_measure(critic, held_out)]
    for step, experience in enumerate(batches):
        batch = _batch(critic, experience)
        critic.train(batch, epochs=EPOCHS, minibatch_size=MINIBATCH, seed=seed + step)
        measured.append(_measure(critic, held_out))
    return measured


def _measure(critic: CriticTrainer, experience: Experience) -> float:
    mask = experience.mask
    values = pad_rows(critic.values(experience.prompts, experience.responses), mask.shape[1])
    returns = torch.from_numpy(experience.scores)[:, None].expand_as(mask)
    return explained_variance(values, returns, mask)


def _batch(critic: CriticTrainer, experience: Experience) -> CriticBatch:
    """The returns are generalised advantages plus values, as in a run."""
    mask = experience.mask
    rows = critic.values(experience.prompts, experience.responses)
    values = pad_rows(rows, mask.shape[1])
    no_kl = torch.zeros_like(values)
    rewards = shape_rewards(torch.from_numpy(experience.scores), no_kl, mask, kl_coef=0, clip=SCORE_CLIP)
    _, returns = gae(rewards, values, mask, gamma=GAMMA, gae_lambda=GAE_LAMBDA)
    return CriticBatch(
        prompts=experience.prompts,
        responses=experience.responses,
        values=rows,
        returns=[row[: len(kept)].numpy() for row, kept in zip(returns, rows, strict=True)],
    )


@contextmanager
def bodies(models: Path, seed: int) -> Iterator[dict[str, Path]]:
    """Folders of what a critic may start from, by name."""
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as random:
        AutoModel.from_config(load_config(str(models / "policy")), trust_remote_code=False).save_pretrained(random)
        yield {"reward model": models / "reward", "policy": models / "policy", "random": Path(random)}


def prompts_of(models: Path, split: str) -> list[str]:
    """The prompts of a split of the recipe's."""
    lines = (models / "prompts" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [str(json.loads(line)["prompt"]) for line in lines]


def measure(models: Path, seed: int, steps: int = max(AT)) -> dict[str, list[float]]:
    """For each start: explained variance after 0, 1, ... `steps` PPO steps."""
    draw = np.random.default_rng(seed)
    torch.manual_seed(seed)
    sampler = Sampler(models)
    train, held = prompts_of(models, "train"), prompts_of(models, "eval")
    batches = [sampler.draw(list(draw.choice(train, BATCH))) for _ in range(steps)]
    held_out = sampler.draw(list(draw.choice(held, HELD_OUT)))
    with bodies(models, seed) as folders:
        return {name: explained(folder, batches, held_out, seed) for name, folder in folders.items()}


def main(
    models: Annotated[Path, typer.Option(help="what `python -m recipes.reviews` made")] = Path("models/reviews"),
    seeds: Annotated[int, typer.Option(min=1, help="draws of responses, heads and random bodies")] = 3,
) -> None:
    """Prints the mean over the seeds, and its range."""
    measured = [measure(models, seed) for seed in range(seeds)]
    drawn = Table(title="explained variance of held-out returns", title_justify="left")
    for column in ("body of", *(f"step {step}" for step in AT)):
        drawn.add_column(column, justify="left" if column == "body of" else "right")
    for name in measured[0]:
        columns = [[run[name][step] for run in measured] for step in AT]
        drawn.add_row(name, *(f"{fmean(c):.2f} ({min(c):.2f}, {max(c):.2f})" for c in columns))
    console.print(drawn)


if __name__ == "__main__":
    typer.run(main)
