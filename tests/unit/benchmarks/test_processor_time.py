"""The processor time that benchmarks/secured_steps compares is that of the right processes."""

import subprocess
import sys

import psutil
import pytest

from benchmarks.processor_time import KINDS, OTHERS, Meter, kind


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("/x/.venv/bin/python /x/.venv/bin/quartet train --overwrite ppo.yaml", "quartet train"),
        ("/x/.venv/bin/python -m services.common.ranks.process_rank 63 1800", "learner's ranks"),
        ("ray::Rank", "learner's ranks"),
        ("ray::ProxyActor", "Serve's proxy"),
        ("ray::ServeReplica:reward:Reward", "replicas"),
        ("VLLM::EngineCore", "vLLM's engine"),
        ("ray::ServeController.listen_for_change", OTHERS),
        ("", OTHERS),
    ],
)
def test_a_process_is_known_by_its_title(title: str, expected: str) -> None:
    assert kind(title) == expected


@pytest.mark.processes
def test_a_process_that_has_ended_keeps_its_last_reading() -> None:
    program = "print(flush=True)\nwhile True: pass"
    busy = subprocess.Popen([sys.executable, "-c", program, "quartet train"], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None
        busy.stdout.readline()  # before it runs, a process has no command line yet
        meter = Meter()
        meter.watch([psutil.Process(busy.pid)])
        while meter.read()["quartet train"] < 0.05:
            pass
    finally:
        busy.kill()
        busy.communicate()
    ended = meter.read()
    assert ended["quartet train"] >= 0.05
    assert ended == dict.fromkeys(KINDS, 0.0) | {"quartet train": ended["quartet train"]}
    assert meter.read() == ended
