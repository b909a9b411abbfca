"""The way of one sample from its prompt to a gradient, through every part that a run has."""

from pathlib import Path

import pytest

from tests.unit.sample_path import STOPS, described, sample_path

FORWARDING = {
    ("orchestrator/loop/trainer.py", "Trainer._step"),
    ("orchestrator/experience/stream.py", "Stream.take"),
    ("services/rollout/client.py", "RolloutClient.generate"),
    ("quartet/serving/door/guard.py", "Guard._received"),
    ("quartet/serving/servicer.py", "translated.<locals>.call"),
    ("services/rollout/vllm/requests.py", "Requests.generate"),
    ("services/reward/scorers/model.py", "ModelScorer.score"),
    ("quartet/learner/trainer.py", "Trainer.train"),
}
"""Functions that each wait for a part of the way: through awaits, a task, gRPC and a thread."""


@pytest.mark.processes  # for its length: it imports vLLM and DeepSpeed, and loads four models
async def test_a_sample_passes_every_stop(policy_folder: Path, reward_folder: Path, tmp_path: Path) -> None:
    path = await sample_path(policy_folder, reward_folder, tmp_path)
    print(described(path))
    assert path.functions.keys() == set(STOPS.values())
    assert path.whole >= FORWARDING
    assert not [name for _, name in path.whole if name.endswith("__post_init__")]  # a helper, which only returns
