"""Processes of an engine whose replica was killed."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.processes

REPLICA = """
import multiprocessing, time
from services.rollout.vllm.plugin import end_with_parent

def engine(pipe):
    end_with_parent()
    end_with_parent()
    pipe.send([multiprocessing.current_process().pid])
    time.sleep(600)

if __name__ == "__main__":
    end_with_parent()  # has no parent that it would end with
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    engines = [multiprocessing.get_context("spawn").Process(target=engine, args=(theirs,)) for _ in range(2)]
    for one in engines:
        one.start()
    print(*ours.recv(), *ours.recv(), flush=True)
    time.sleep(600)
"""


def test_engines_end_when_their_replica_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "replica.py"
    script.write_text(REPLICA)
    replica = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert replica.stdout
    engines = [psutil.Process(int(pid)) for pid in replica.stdout.readline().split()]
    assert len(engines) == 2
    assert all(engine.is_running() for engine in engines)
    replica.kill()
    replica.wait()
    _, alive = psutil.wait_procs(engines, timeout=10)
    assert [engine for engine in alive if engine.status() != psutil.STATUS_ZOMBIE] == []
