"""Gloo groups of one rank in a process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

PROCESS = """
import json, threading, time
from datetime import timedelta
from pathlib import Path
import torch
from torch import distributed
from quartet.ranks.lone_groups import share_listener

def listeners():
    return sum((task / "comm").read_text() == "gloo_tcp_loop\\n" for task in Path("/proc/self/task").iterdir())

share_listener()
share_listener()
distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
groups = [distributed.new_group([0], backend="gloo") for _ in range(5)]
alone = torch.arange(3.0)
for group in groups:
    distributed.all_reduce(alone, group=group)
end = time.monotonic() + 10
while not (lone := listeners()) and time.monotonic() < end:  # a thread names itself when it comes to run
    time.sleep(0.01)

store, minute = distributed.HashStore(), timedelta(seconds=60)
sums = [torch.full((2,), float(rank + 1)) for rank in range(2)]

def meet(rank):
    pair = distributed.distributed_c10d.ProcessGroupGloo(store, rank, 2, timeout=minute)
    pair.allreduce([sums[rank]]).wait()
    met.wait()

met = threading.Barrier(3)
members = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
for member in members:
    member.start()
met.wait()
print(json.dumps({"lone": lone, "alone": alone.tolist(), "sums": [each.tolist() for each in sums]}))
"""


def test_lone_groups_share_a_listener_and_pairs_still_meet(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(PROCESS)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=120)
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen == {"lone": 1, "alone": [0.0, 1.0, 2.0], "sums": [[3.0, 3.0], [3.0, 3.0]]}
