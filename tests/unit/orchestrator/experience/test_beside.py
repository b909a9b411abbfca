"""A user's code in threads, and the end of the program while it computes."""

import subprocess
import sys

PROGRAM = """
import asyncio, threading
from orchestrator.experience.beside import in_thread

begun = threading.Event()

def judge():
    import torch
    weights = torch.ones(100, 100, requires_grad=True)
    while True:
        (weights @ weights).sum().backward()
        begun.set()

async def main():
    judging = asyncio.ensure_future(in_thread(judge, "judge"))
    while not begun.is_set():
        await asyncio.sleep(0.01)
    raise KeyboardInterrupt

asyncio.run(main())
"""


def test_a_program_that_ends_while_a_judge_computes_does_not_crash() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=False)
    assert ended.stderr.strip().endswith("KeyboardInterrupt")
    assert "terminate" not in ended.stderr
