"""The trainings on examples, a row each: the name of a command, and the class of its file."""

from orchestrator.supervised.contract import Supervised
from orchestrator.supervised.reward_model import RewardModel
from orchestrator.supervised.sft import SFT

TRAININGS: dict[str, type[Supervised]] = {
    "sft": SFT,
    "reward-model": RewardModel,
}
"""Command -> class."""
