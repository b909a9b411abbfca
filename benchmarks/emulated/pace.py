"""Times of the emulated services, and the least times of a step that follow from them."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from quartet.folders import replace_file

PROMPT, RESPONSE = 8, 16
"""Tokens of each prompt and of each response."""
VOCABULARY = 64
"""Tokens that there are."""
CHECKSUM = "emulated"
"""Checksum of any weights."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds that each part takes for a batch of responses of equal length.

    The engine has room for one batch. Reward, reference and critic take one pair after the other, each its share of
    the batch's time.
    """

    generate: float
    score: float
    reference: float
    values: float
    logprobs: float
    """The policy's own log-probs of a batch, before it trains."""
    train: float
    """Training of the policy."""
    train_critic: float
    """Training of the critic, beside the policy's."""
    stage: float
    """Copy of the weights, for which training waits."""
    deliver: float
    """The rest of a push."""

    @property
    def critical_path(self) -> float:
        """Seconds of a step at lock-step, without the loop's own work and calls.

        generate, then the slowest of score, reference and values, then logprobs, then the slower of train and
        train_critic, then stage and deliver.
        """
        judged = max(self.score, self.reference, self.values)
        trained = max(self.train, self.train_critic)
        return self.generate + judged + self.logprobs + trained + self.stage + self.deliver

    @property
    def stages(self) -> dict[str, float]:
        """Seconds of the stages that work side by side when samples are made ahead.

        rollout: generate. scoring: the slower of score and reference. learner: the slower of values and logprobs,
        which are then both asked for when a batch is taken, the slower of train and train_critic, and stage. push:
        deliver.
        """
        learner = max(self.values, self.logprobs) + max(self.train, self.train_critic) + self.stage
        return {
            "rollout": self.generate,
            "scoring": max(self.score, self.reference),
            "learner": learner,
            "push": self.deliver,
        }

    @property
    def slowest_stage(self) -> float:
        """Seconds of the slowest of `stages`: no step can take less in the mean."""
        return max(self.stages.values())

    def times(self, factor: float) -> Self:
        """All times multiplied by `factor`."""
        return type(self)(**{name: factor * seconds for name, seconds in asdict(self).items()})

    @classmethod
    def read(cls, file: Path) -> Self:
        """Reads what `write` wrote."""
        return cls(**json.loads(file.read_text()))

    def write(self, file: Path) -> None:
        """Writes the times to `file`, from which the replicas read them at each use."""
        replace_file(file, json.dumps(asdict(self)).encode())


CASES = {
    "generation-bound": Pace(
        generate=0.60, score=0.05, reference=0.05, values=0.04, logprobs=0.05,
        train=0.25, train_critic=0.20, stage=0.02, deliver=0.03,
    ),
    "training-bound": Pace(
        generate=0.25, score=0.04, reference=0.04, values=0.04, logprobs=0.08,
        train=0.58, train_critic=0.40, stage=0.02, deliver=0.03,
    ),
    "reward-bound": Pace(
        generate=0.25, score=0.55, reference=0.05, values=0.05, logprobs=0.03,
        train=0.12, train_critic=0.10, stage=0.02, deliver=0.03,
    ),
}  # fmt: skip
"""Shares of a step at lock-step. generation-bound has the proportions of the 7B row of DeepSpeed-Chat's comparison,
in which generation takes about 60 % of a step, with responses of equal length."""
