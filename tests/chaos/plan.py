"""The faults of a seed: which process, what happens to it, and at what moment."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Action = Literal["kill", "freeze"]

REPLICAS = ("rollout", "engine", "rollout and engine", "reward", "reference", "critic")
"""Replicas of the services. An engine is the process of vLLM below its replica."""
KINDS = (*REPLICAS, "critic rank", "proxy", "controller", "registry", "policy rank", "orchestrator")
NEW = ("rollout", "reward", "reference", "critic")
"""Kinds that are also struck while they start, as the successors of others."""
MOMENTS = {"step": 6, "push": 5, "checkpoint": 3, "resume": 2, "return": 2, "new": 2}
"""Moment -> how often it is drawn.

step        any moment of a step
push        a step is trained and its weights are not pushed yet
checkpoint  one is being written
resume      the orchestrator was killed and resumes
return      a learner was lost and the run goes back to its last checkpoint
new         a replica was killed and its successor starts: that one is struck
start       `quartet train` has just begun; the first fault of each run
"""
LED = {"resume": "orchestrator", "return": "policy rank"}
"""Moment -> what is killed to bring it about, which is a fault of its own."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    number: int
    kind: str
    action: Action
    moment: str
    delay: float
    """Part of the moment's length after which it comes, from 0 to 1."""
    frozen_s: float
    """Seconds after which an orchestrator that was frozen goes on, which nothing ends."""

    def __str__(self) -> str:
        return f"fault {self.number}: {self.action} {self.kind} ({self.moment}, {self.delay:.2f})"


def faults(seed: int, count: int, each: int) -> Iterator[list[Fault]]:
    """The faults of runs that have `each` of them at most, and of all runs `count`."""
    number = 0
    while number < count:
        begin, run = number, list[Fault]()
        while number < min(count, begin + each):
            drawn = _fault(random.Random(f"{seed} {number}"), number, first=number == begin)
            led = LED.get(drawn.moment) or (drawn.kind if drawn.moment == "new" else None)
            if led:
                run.append(Fault(number, led, "kill", "step", drawn.delay, 0))
                number += 1
            run.append(Fault(number, drawn.kind, drawn.action, drawn.moment, drawn.delay, drawn.frozen_s))
            number += 1
        yield run


def _fault(chance: random.Random, number: int, *, first: bool) -> Fault:
    moment = "start" if first else chance.choices(list(MOMENTS), list(MOMENTS.values()))[0]
    kind = chance.choice(NEW if moment == "new" else KINDS)
    if moment in ("start", "resume", "return") and kind == "orchestrator" and chance.random() < 0.5:
        kind = chance.choice(REPLICAS)
    action: Action = chance.choice(("kill", "freeze"))
    return Fault(number, kind, action, moment, chance.random(), chance.uniform(3, 20))
