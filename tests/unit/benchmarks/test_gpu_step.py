"""The file with which benchmarks/gpu/step.py runs everything on one GPU is valid, and sees to equal work."""

from pathlib import Path

import pytest
import yaml

from benchmarks.gpu.step import configured, halved, models, peer_settings, trials
from orchestrator.commands.checks.preflight import preflight
from orchestrator.deployment.file import Deployment


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("colocate", [False, True])
def test_its_file_passes_the_checks_of_a_run(tmp_path: Path, device: str, colocate: bool) -> None:
    models(tmp_path, "tiny", 8, 6, "cuda")
    raw = configured(tmp_path, batch=8, prompt=6, new=10, device=device, colocate=colocate)
    file = tmp_path / "race.yaml"
    file.write_text(yaml.safe_dump(raw))
    deployment = Deployment.load(file, check_services=True)
    inputs = preflight(deployment)
    run, theirs = deployment.orchestrator, peer_settings(tmp_path, 8, 10, 3, device)
    assert {len(prompt.prompt_ids) for prompt in inputs.train.prompts} == {6}
    assert run.sampling.min_new_tokens == run.sampling.max_new_tokens == theirs["response"] == 10
    assert run.batch_size // run.algorithm.minibatch_size == theirs["minibatches"]
    assert run.algorithm.epochs == theirs["epochs"]
    assert run.policy.dtype == theirs["weights"]


def test_a_batch_is_halved_while_it_can_be_whitened() -> None:
    assert halved(256) == [256, 128, 64, 32]
    assert halved(40) == [40]


def test_the_peer_first_takes_the_whole_batch_at_once(tmp_path: Path) -> None:
    assert trials(128) == [(128, 128), (128, 64), (128, 32), (64, 64), (64, 32), (32, 32)]
    assert peer_settings(tmp_path, 256, 8, 2, "cuda")["forward"] == 256
    assert peer_settings(tmp_path, 256, 8, 2, "cuda", 64)["forward"] == 64
