"""The file with which benchmarks/gpu/step.py runs everything on one GPU is valid, and sees to equal work."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml

from benchmarks.gpu.models import shape
from benchmarks.gpu.results import Results
from benchmarks.gpu.step import (
    LOCK_STEP,
    SAMPLED,
    WAYS,
    configured,
    models,
    peer_settings,
    set_way,
    sizes_that_fit,
    theirs,
    trl_gib,
)
from benchmarks.lent.stages import CARD_GIB, MORE_GIB, STAGES
from orchestrator.commands.checks.preflight import preflight
from orchestrator.deployment.file import Deployment
from orchestrator.deployment.memory import footprints, worst_phase
from orchestrator.deployment.recomputation import decided
from quartet.config.base import GIB
from quartet.models.size import ModelSize

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(("way", "colocate"), [*((way, False) for way in WAYS), (LOCK_STEP, True)])
def test_its_file_passes_the_checks_of_a_run(tmp_path: Path, device: str, way: str, colocate: bool) -> None:
    models(tmp_path, "tiny", 8, 6, "cuda")
    raw = set_way(configured(tmp_path, batch=8, prompt=6, new=10, device=device, colocate=colocate), way)
    file = tmp_path / "race.yaml"
    file.write_text(yaml.safe_dump(raw))
    deployment = Deployment.load(file, check_services=True)
    inputs = preflight(deployment)
    run, theirs = deployment.orchestrator, peer_settings(tmp_path, [], 10, 3, device)
    assert {len(prompt.prompt_ids) for prompt in inputs.train.prompts} == {6}
    assert run.sampling.min_new_tokens == run.sampling.max_new_tokens == theirs["response"] == 10
    assert run.batch_size // run.algorithm.minibatch_size == theirs["minibatches"]
    assert run.algorithm.epochs == theirs["epochs"]
    assert run.policy.dtype == theirs["weights"]
    assert run.loop.max_staleness == (way == "ahead")
    assert run.algorithm.needs_old_logprobs(8) == (way != SAMPLED)
    shares = [app["deployments"][0]["ray_actor_options"].get("num_gpus", 0) for app in raw["applications"]]
    assert device == "cpu" or sum(shares) + shares[0] + run.policy.num_gpus <= 1  # two engines, and all others


@pytest.mark.parametrize(
    ("way", "colocate", "gib"), [(LOCK_STEP, False, 74), (LOCK_STEP, True, 70), ("two engines", False, 85)]
)
def test_a_step_of_a_large_model_on_a_card_of_80_gb(tmp_path: Path, way: str, colocate: bool, gib: float) -> None:
    """The sums of memory, with activations recomputed; that of two engines needs a larger card."""
    for part in ("policy", "reward"):
        shape("1.5B").save_pretrained(tmp_path / part)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    raw = set_way(configured(tmp_path, batch=256, prompt=128, new=256, colocate=colocate), way)
    raw["orchestrator"]["gpu_gib"] = 79
    (tmp_path / "race.yaml").write_text(yaml.safe_dump(raw))
    deployment = Deployment.load(tmp_path / "race.yaml", check_services=True)
    sizes = {str(tmp_path / part): shape("1.5B") for part in ("policy", "reward")}
    parts = footprints(decided(deployment, sizes), 79 * GIB, lambda folder: ModelSize.of(sizes[folder]))
    phase, worst = worst_phase(parts)
    assert round(sum(part.during(phase) for part in worst) / GIB) == gib
    gates = [stage.gib for stage in STAGES if stage.module == "benchmarks.gpu.step" and "1.5B" in stage.gpu]
    assert min(gates) == CARD_GIB
    assert gib < (MORE_GIB if way == "two engines" else CARD_GIB)


def test_the_peer_takes_the_largest_batch_that_fits_by_arithmetic() -> None:
    by_hand = 16 * 1_543_714_304 + 3 * 4 * 192 * 256 * 151_936 + 4 * 192 * 384 * 28 * 256
    assert trl_gib("1.5B", 192, 1, 384, 256) == pytest.approx(by_hand / 2**30)
    h200 = sizes_that_fit("1.5B", 256, 384, 256, 139.8)
    assert h200[:2] == [{"batch": 192, "micro": 24}, {"batch": 128, "micro": 16}]
    assert sizes_that_fit("0.5B", 256, 384, 256, 139.8)[0]["batch"] == 256
    assert sizes_that_fit("0.5B", 256, 384, 256, 79.2)[0] == {"batch": 128, "micro": 16}
    assert sizes_that_fit("1.5B", 256, 384, 256, CARD_GIB)[0] == {"batch": 64, "micro": 8}
    assert sizes_that_fit("1.5B", 256, 384, 256, 24.0) == []


def test_a_training_pass_of_the_peer_needs_what_a_plain_loop_took() -> None:
    """One model's states for 16,384 tokens took 44 GiB on an H200."""
    tokens, logits = 16_384, 8 * 151_936 * 16_384
    rest = 20 * 1_543_714_304 + 4 * 64 * 256 * 151_936
    both = trl_gib("1.5B", 64, 8, tokens // 8, 256) * 2**30 - rest - logits
    assert both / 2 / 2**30 == pytest.approx(44, rel=0.05)


def test_figures_of_earlier_runs_stay(tmp_path: Path) -> None:
    for size in ("0.5B", "1.5B"):
        Results("step", tmp_path).add(size, step_s=1.0)
    rows = [json.loads(line) for line in (tmp_path / "step.jsonl").read_text().splitlines()]
    assert [row.get("what", "a run") for row in rows] == ["a run", "0.5B", "a run", "1.5B"]


def test_what_the_peer_measured_is_kept_before_its_last_update(tmp_path: Path) -> None:
    """One whose first batch does not fit after an update, and that fails before its last one."""
    python = tmp_path / "python"
    updates = [
        {"seconds": float(s), "ended": float(s), "batch": batch} for s, batch in ((9, 8), (5, 4), (2, 4), (4, 4))
    ]
    lines = "".join(f"echo '{json.dumps(update)}'\n" for update in updates)
    python.write_text(f"#!/bin/sh\necho loading\n{lines}echo 'no memory' >&2; exit 1\n")
    python.chmod(0o755)
    results = Results("step", tmp_path)
    settings = peer_settings(tmp_path, [], 4, 4, "cpu")
    results.attempt("TRL", partial(theirs, results, "TRL", str(python), settings))
    rows = [json.loads(line) for line in (tmp_path / "step.jsonl").read_text().splitlines()[1:]]
    assert [(row["what"], row.get("samples_s"), row.get("batch")) for row in rows] == [
        ("TRL, so far", 2.0, 4),
        ("TRL, so far", 4 / 3, 4),
        ("TRL", None, None),
    ]
    assert "no memory" in rows[-1]["error"]


def test_the_peer_goes_on_to_a_smaller_batch_where_memory_does_not_suffice(tmp_path: Path) -> None:
    """The real peer, whose trainers are replaced by one that needs a small batch."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    program = (
        "import sys, types\n"
        "sys.modules['datasets'] = types.SimpleNamespace(Dataset=None)\n"
        "import torch\n"
        "from benchmarks.vs_trl import peer\n"
        "class Trainer:\n"
        "    def __init__(self, settings, prompts): self._batch = settings['batch']\n"
        "    def train(self):\n"
        "        print('batch', self._batch)\n"
        "        if self._batch > 2: raise torch.OutOfMemoryError('too large')\n"
        "peer.ppo = Trainer\n"
        "import json\n"
        "peer.main(json.loads(sys.argv[1]))\n"
    )
    for batches, status in ((8, 4, 2, 1), 0), ((8, 4), 1):
        settings = peer_settings(tmp_path, [{"batch": count, "micro": 1} for count in batches], 4, 2, "cpu")
        command = [sys.executable, "-c", program, json.dumps(settings)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == status, done.stderr
        assert done.stdout.split() == [word for count in batches if count > 1 for word in ("batch", str(count))]
