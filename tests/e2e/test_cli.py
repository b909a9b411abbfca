"""`quartet check`, from outside."""

from copy import deepcopy
from pathlib import Path

import yaml

from tests.cluster import Quartet, command
from tests.commands import finished


def test_check_passes_the_file_that_is_deployed(quartet: Quartet, tmp_path: Path) -> None:
    status, printed = finished(tmp_path, "check", str(quartet.config))
    filled_in, last = printed.splitlines()
    assert (status, last) == (0, f"{quartet.config}: fine")
    assert filled_in.startswith("orchestrator.algorithm: kind ppo fills in baseline critic")


def test_check_lists_every_problem_of_a_file(quartet: Quartet, tmp_path: Path) -> None:
    raw = deepcopy(quartet.raw)
    rollout, reward, reference, critic = (application["args"] for application in raw["applications"])
    rollout["max_lenght"] = 64
    reward["scorer"]["model"] = "/no/such/model"
    reference["dtype"] = "float16"
    del critic["optimizer"]
    raw["orchestrator"] |= {"steps": 0, "sampling": {"temperature": "warm"}}
    raw["orchestrater"] = {}
    broken = tmp_path / "broken.yaml"
    broken.write_text(yaml.safe_dump(raw))
    done = command(tmp_path, "check", str(broken))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for problem in (
        f"{broken}: orchestrater: unknown section; known: applications, ",
        "applications.rollout.args.max_lenght: unknown field; known: adapter_versions, adapters, ",
        "applications.reward.args.scorer.model: no such folder on this machine (looked for /no/such/model)",
        "applications.reference.args.dtype: should be 'float32' or 'bfloat16', got 'float16'",
        "applications.critic.args.optimizer: required",
        "orchestrator.steps: should be 1 or more, got 0",
        "orchestrator.sampling.temperature: should be a number, got 'warm'",
    ):
        assert problem in done.stderr
