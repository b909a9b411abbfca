"""docs/security.md, its commands for several nodes, given on two machines; one loses its network and comes back."""

import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from orchestrator.monitoring.metrics import read_metrics
from tests.configuration import REPO, configuration, write_prompts
from tests.machines import Machine, two_machines
from tests.shell import PATIENCE_S, Shell

PAGE = (REPO / "docs" / "security.md").read_text().partition("## A Ray cluster of your own")[2]
ONE, SEVERAL = (
    re.findall(r"^\$ (.+?)(?:  +#.*)?$", part.partition("```console")[2].partition("```")[0], re.MULTILINE)
    for part in PAGE.split("###")[:2]
)
HTTP, GRPC = 18000, 19000
TOLERANCE = 1e-3


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine, Path]]:
    with (
        tempfile.TemporaryDirectory(prefix="qn-", dir="/tmp") as temporary,  # Ray's sockets allow only short paths
        two_machines(Path(temporary)) as (first, second),
    ):
        yield first, second, Path(temporary)


def deployment(folder: Path, policy: Path, reward: Path) -> dict[str, Any]:
    """A replica of the rollout service on each node, everything else on the first."""
    raw = configuration(policy, reward, write_prompts(folder), HTTP, GRPC)
    for application, resource in zip(raw["applications"], ("rollout", *["first"] * 3), strict=True):
        amount = 1 if resource == "rollout" else 0.1
        application["deployments"][0]["ray_actor_options"]["resources"] = {resource: amount}
    raw["orchestrator"] |= {"steps": 100_000, "evaluation": {"every": 0}}
    raw["orchestrator"]["policy"]["resources"] = {"first": 0.1}
    # With no proof but those that a change of the members brings.
    raw["orchestrator"]["weights"] |= {"host": None, "prove_every": 0}
    return raw


@pytest.mark.exhaustive  # a cluster and a quartet of its own
@pytest.mark.timeout(1200)
def test_a_node_that_loses_its_network_costs_no_sample_and_joins_again(
    machines: tuple[Machine, Machine, Path], tmp_path: Path, policy_folder: Path, reward_folder: Path
) -> None:
    first, second, temporary = machines
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(deployment(tmp_path, policy_folder, reward_folder)))
    more = "--num-cpus 4 --object-store-memory 100000000 --resources "
    exchanged = {
        "quartet render mine.yaml >": "cat mine.yaml >",  # which is a whole file here
        "RAY_ADDRESS=auto": "RAY_ADDRESS=10.0.0.1:6379",
        "address 10.0.0.1 ": f'address 10.0.0.1 {more}\'{{"rollout": 1, "first": 1}}\' ',
        "address 10.0.0.2 ": f"address 10.0.0.2 {more}'{{\"rollout\": 1}}' ",
    }
    shell = Shell(tmp_path, {"RAY_TMPDIR": str(temporary)}, exchanged, first.enter)
    *settings, start, start_again, deploy, train = SEVERAL
    for line in (*ONE[:4], *settings, f"{start} "):
        shell.run(line)
    beside = shell.beside(second.enter)
    beside.run(f"{start_again} ")
    shell.run(deploy)
    wait(lambda: shell.run("serve status").count("status: RUNNING") == 4)

    log, metrics = tmp_path / "train.log", tmp_path / "runs" / "three-steps" / "metrics.jsonl"
    with shell.start(train, log) as run:

        def rows() -> list[dict[str, float]]:
            return read_metrics(metrics) if metrics.exists() else []

        def until(enough: Callable[[list[dict[str, float]]], bool]) -> int:
            """Waits for such rows; their number."""

            def there() -> bool:
                assert run.poll() is None, log.read_text()
                return enough(rows())

            wait(there)
            return len(rows())

        def proved(since: int) -> Callable[[list[dict[str, float]]], bool]:
            return lambda found: any("push/difference" in row for row in found[since:])

        try:
            begun = until(lambda found: len(found) > 4)
            second.cut()
            alone = until(proved(begun))
            wait(lambda: shell.run("ray list nodes").count(" DEAD ") == 1)
            second.mend()
            beside.run(f"{start_again} ")
            together = until(proved(alone))
            done = until(lambda found: len(found) > together + 2)
        finally:
            for process in psutil.Process(run.pid).children(recursive=True):
                process.send_signal(signal.SIGINT)
    trained = rows()
    assert len(trained) >= done
    assert [row["step"] for row in trained] == list(range(1, len(trained) + 1)), log.read_text()
    assert all(row["samples/used"] == 16 for row in trained)
    assert max(row["mismatch/max_abs"] for row in trained) < TOLERANCE
    print(f"longest step: {max(row['seconds/step'] for row in trained):.1f} s")


def wait(there: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < end
        time.sleep(0.5)
