"""Starts a quartet of its own with tiny models, two replicas of each service but the critic, strikes runs on it with
random faults, and prints what each kind of fault cost. The exit status is 1 if anything is wrong; then the folder
with all logs is kept and named.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from tests.campaigns import run


async def main(given: argparse.Namespace, folder: Path, console: Console, say: Callable[[str], None]) -> list[str]:
    """Problems; none if every run kept what is promised."""
    # Imported here: Ray reads the environment when it is imported.
    from tests.chaos.campaign import campaign, doubled
    from tests.chaos.report import table
    from tests.cluster import running_quartet
    from tests.models import make_policy, make_reward

    until = time.monotonic() + 60 * given.minutes
    policy = make_policy(folder / "policy", kind="llama", tied=False)
    reward = make_reward(folder / "reward")
    (folder / "quartet").mkdir()
    async with running_quartet(folder / "quartet", policy, reward, doubled) as quartet:
        say("the quartet is up")
        asked = (given.seed, given.faults, given.each, given.staleness)
        outcomes = [each async for each in campaign(quartet, *asked, say, first=given.first, until=until)]
    console.print(table(outcomes, given.seed, given.staleness))
    return [f"seed {given.seed}, {problem}" for outcome in outcomes for problem in outcome.problems]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--staleness", type=int, default=0, choices=(0, 1, 2), help="loop.max_staleness")
    parser.add_argument("--each", type=int, default=25, help="faults in one run")
    parser.add_argument("--first", type=int, default=0, help="number of the first run, to go on with a seed")
    parser.add_argument("--minutes", type=float, default=600, help="no fault comes after so many")
    run(main, parser.parse_args(), "chaos")
