"""Starts the rollout service alone with two replicas, opens streams at its HTTP door, and pushes versions and
kills replicas meanwhile. Three of four streams are left early, at a random event; the others are read.

Each version's weights make another token certain, so that a token tells by which weights it was computed. The exit
status is 1 if a stream did not end with an answer or an error that names the reason, if a token was not computed by
the version that its reply names, if a push failed, or if no stream was read to its end.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.campaigns import run


def alone(raw: dict[str, Any]) -> None:
    """Leaves the rollout service alone in a deployment file."""
    raw["applications"] = raw["applications"][:1]
    del raw["orchestrator"]


async def main(given: argparse.Namespace, folder: Path, console: Console, say: Callable[[str], None]) -> list[str]:
    """All that is wrong."""
    # Imported here: Ray reads the environment when it is imported.
    from tests.cluster import running_quartet
    from tests.streams.campaign import campaign
    from tests.streams.certain import make_certain

    (folder / "services").mkdir()
    policy = make_certain(folder / "policy")
    async with running_quartet(folder / "services", policy, policy, alone) as quartet:
        say("all replicas run")
        started = time.monotonic()
        verdict = await campaign(quartet, given.seed, given.streams, given.seconds, given.push_s, given.kill_s, say)
        seconds = time.monotonic() - started
    table = Table("measure", "value", title=f"{verdict.streams} streams, seed {given.seed}")
    for end, times in verdict.ends.most_common():
        table.add_row(end, str(times))
    for name, value in {
        "tokens compared": f"{verdict.tokens:,}",
        "replies of several versions": str(verdict.across),
        "pushes": f"{verdict.pushes}, in {verdict.tries} tries, one in {seconds / max(verdict.pushes, 1):.1f} s",
        "replicas killed": f"{verdict.kills}, one in {seconds / max(verdict.kills, 1):.1f} s",
        "slowest stream": f"{verdict.slowest_s:.1f} s",
        "problems": str(len(verdict.wrong)),
    }.items():
        table.add_row(name, value)
    console.print(table)
    return verdict.wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.streams", description=__doc__)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="no stream begins later")
    parser.add_argument("--push-s", type=float, default=1.0, help="seconds from push to push")
    parser.add_argument(
        "--kill-s", type=float, default=10.0, help="seconds from kill to kill, or until both serve again"
    )
    run(main, parser.parse_args(), "streams")
