"""The record of a deployment's file, which holds no secret."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.deployment.file import Deployment, ServicesFile
from orchestrator.deployment.record import HIDDEN, gaps, record
from orchestrator.monitoring.metrics import MetricsLog
from orchestrator.report.page import write_report
from quartet.config.base import ConfigError
from quartet.security.port import Port

SECRET = "hf_abcdef0123456789"
FILE = f"""
shared:
  token: &token {SECRET}
  env: &env {{env_vars: {{HF_TOKEN: *token, OMP_NUM_THREADS: "1"}}}}
applications:
  - name: reward
    runtime_env: *env
    args: {{env_vars: {{KEY: *token}}, model: here}}
orchestrator:
  name: run
  policy: {{model: models/policy, env_vars: {{WANDB_API_KEY: *token}}}}
"""


def test_names_of_variables_stay_and_their_values_do_not() -> None:
    raw = yaml.safe_load(FILE)
    kept = record(raw)
    assert SECRET not in yaml.safe_dump(kept)
    assert kept["applications"][0]["runtime_env"]["env_vars"] == {"HF_TOKEN": HIDDEN, "OMP_NUM_THREADS": HIDDEN}
    assert kept["applications"][0]["args"]["model"] == "here"
    assert kept["orchestrator"]["policy"] == {"model": "models/policy", "env_vars": {"WANDB_API_KEY": HIDDEN}}
    assert SECRET in yaml.safe_dump(raw)
    assert record(kept) == kept


def test_no_secret_is_in_the_folder_of_a_run(tmp_path: Path) -> None:
    raw = yaml.safe_load(FILE)
    deployment = ServicesFile(path=tmp_path / "file.yaml", applications=(), services={}, raw=raw, port=Port())
    sent: list[object] = []

    class Wandb:
        def init(self, **options: object) -> "Wandb":
            sent.append(options)
            return self

        def define_metric(self, *names: object, **options: object) -> None: ...

        def finish(self) -> None: ...

        def log(self, *values: object, **options: object) -> None: ...

    from orchestrator.config.run import LogConfig

    config = LogConfig(tensorboard=False, wandb_project="quartet")
    with MetricsLog.open(tmp_path / "run", config, deployment.record, load=lambda name: Wandb()) as log:
        log.write(0, {"eval/score": 1.0})
    write_report(tmp_path / "run")
    written = [path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any("WANDB_API_KEY" in text for text in written)
    assert "WANDB_API_KEY" in str(sent)
    assert not any(SECRET in text for text in [*written, str(sent)])


def test_a_kept_file_is_not_deployed_before_its_values_are_put_back(tmp_path: Path) -> None:
    kept = record(yaml.safe_load(FILE))
    assert (
        gaps(kept)[0]
        == "applications.reward.runtime_env.env_vars.HF_TOKEN: not kept with the run; insert its value again"
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(kept))
    with pytest.raises(ConfigError, match=r"orchestrator\.policy\.env_vars\.WANDB_API_KEY: not kept with the run"):
        Deployment.load(tmp_path / "config.yaml")


def test_gaps_are_found_whatever_the_names_are() -> None:
    hidden = {"env_vars": {"A": HIDDEN}}
    names: list[Any] = [None, [], {"a": 1}, "x"]
    for name in names:
        entries = [{"name": name, **hidden}, {"name": name, **hidden}]
        assert len(gaps({"applications": entries})) == 2
