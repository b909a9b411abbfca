"""The costs of faults by kind."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from rich.table import Table

from tests.chaos.driver import Outcome, Struck


def table(outcomes: Sequence[Outcome], seed: int, staleness: int) -> Table:
    """A row for each kind of process and fault."""
    steps, seconds = sum(each.steps for each in outcomes), sum(each.seconds for each in outcomes)
    struck = [(each, outcome.cost_s(each)) for outcome in outcomes for each in outcome.struck if each.found]
    title = (
        f"{len(struck)} faults in {len(outcomes)} runs of {steps} steps together, {seconds:.0f} s, seed {seed}, "
        f"max_staleness {staleness}"
    )
    rows: dict[tuple[str, str], list[tuple[Struck, float]]] = defaultdict(list)
    for each, cost in struck:
        rows[each.fault.kind, each.fault.action].append((each, cost))
    shown = Table("process", "fault", "count", "median cost s", "longest", "returns", "problems", title=title)
    for (kind, action), those in sorted(rows.items()):
        costs = [cost for _, cost in those]
        shown.add_row(
            kind,
            action,
            str(len(those)),
            f"{median(costs):.1f}",
            f"{max(costs):.1f}",
            str(sum(each.returns for each, _ in those)),
            str(sum(len(each.problems) for each, _ in those)),
        )
    return shown
