"""Strikes a run with the faults of a plan, one after the other, and measures what each costs."""

import asyncio
import contextlib
import math
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import psutil

from quartet.wire.errors import ServiceError
from tests.chaos.plan import REPLICAS, Fault
from tests.chaos.run import LAST, ChaosRun
from tests.chaos.verdict import differs_from_its_replay, wrong_samples, wrong_services, wrong_steps
from tests.chaos.victims import application_of, serving, starting, victims
from tests.cluster import Quartet
from tests.commands import PATIENCE_S

WHOLE_S = 180.0
"""Longest wait for what was struck to be replaced."""
STUCK_S = 180.0
"""Seconds without progress after which a run counts as stuck."""
APPEARS_S = 20.0
"""Longest wait for a process that a start or a return is about to make."""
ON = 2
"""Steps of progress after a fault before the next."""
FROZEN_S = 90.0
"""Seconds after which a frozen process is killed that the run or Serve should have ended long before."""
MOST_ENDS = 3
"""Times that a run is resumed which ends by itself without a step in between."""
MOST_S = 15.0
"""Seconds that a frozen replica may cost."""
ASKED_AGAIN = ("reward", "reference")
"""Services whose other replica answers what a frozen one does not."""
MOMENT_S = {"push": 5.0, "checkpoint": 5.0, "return": 30.0}
"""Longest wait for each moment that a run comes to by itself."""
LENGTH_S = {"start": 8.0, "resume": 8.0, "return": 5.0, "new": 4.0, "step": 1.0}
"""Seconds within which a fault of each moment comes."""

Say = Callable[[str], None]


@dataclass(slots=True)
class Struck:
    """A fault that was carried out, and what it cost."""

    fault: Fault
    pids: list[int]
    moment: str
    """The point that the run had come to: its step, and the seconds since its process began."""
    at: float
    gap_s: float = 0.0
    """Longest time without progress until the next fault, without the time for which the orchestrator itself was
    frozen."""
    returns: int = 0
    """Times that the run went back to a checkpoint meanwhile."""
    problems: list[str] = field(default_factory=list)

    @property
    def found(self) -> bool:
        """False if there was no such process, so that nothing was struck."""
        return bool(self.pids)


@dataclass(slots=True)
class Outcome:
    """A run's faults, and all that is wrong with it."""

    struck: list[Struck]
    problems: list[str]
    steps: int
    seconds: float
    usual_s: float
    """Median time of a step."""

    def cost_s(self, struck: Struck) -> float:
        """Seconds without progress that a fault caused, beyond a usual step."""
        return max(0.0, struck.gap_s - self.usual_s)


class Hopeless(Exception):
    """A run that ends again and again without a step in between."""


class Driver:
    """Drives one run through its faults."""

    def __init__(self, run: ChaosRun, say: Say, hit: set[int]) -> None:
        """`hit` holds replicas that lost their engine or were frozen, in this run or before, though Serve may call
        them RUNNING for a while."""
        self._run, self._say, self._hit = run, say, hit
        self._quartet: Quartet = run.quartet
        self._frozen: dict[int, float] = {}
        """Frozen processes -> the moment by which they have to be ended."""
        self._struck: list[Struck] = []
        self._problems: list[str] = []
        self._returns = 0
        self._ends = 0
        """Times in a row that the run ended by itself without a step in between."""
        self._ended_at = 0
        """Step of the last of them."""

    async def drive(self, faults: Sequence[Fault], staleness: int, until: float = math.inf) -> Outcome:
        """Carries the faults out, lets the run finish, and judges it. No fault comes after the moment `until`."""
        began, run = time.monotonic(), self._run
        run.write(100_000)
        try:
            await self._all(faults, until)
            steps = run.best
            self._problems += wrong_steps(run.folder, steps) + wrong_samples(run.folder, steps, staleness)
            self._problems += await wrong_services(run, steps)
            self._problems += await asyncio.to_thread(differs_from_its_replay, run, staleness, steps)
        except Hopeless:
            pass  # noted
        finally:
            await asyncio.to_thread(run.kill)
            for pid in list(self._frozen):
                self._kill(pid)
        outcome = Outcome(self._struck, self._problems, run.best, time.monotonic() - began, run.usual_s)
        outcome.problems.extend(over_bound(outcome))
        return outcome

    async def _all(self, faults: Sequence[Fault], until: float) -> None:
        """Carries out all faults, and lets the run finish."""
        for fault in faults:
            late = time.monotonic() > until and bool(self._struck) and not self._leads(self._struck[-1].fault)
            if late or not await self._carried_out(fault):
                break
        await self._finish()

    async def _carried_out(self, fault: Fault) -> bool:
        """Waits for the fault's moment, strikes, and watches until the run has gone on; False if it is stuck."""
        run = self._run
        led = bool(self._struck) and fault.moment in ("resume", "return", "new")
        if fault.moment == "start":
            run.start()
            replica = await self._chosen(fault)
        elif led and fault.moment == "new":
            replica = await self._newcomer(fault)
        else:
            replica = await self._chosen(fault)
            await self._moment(fault)
        if fault.moment in LENGTH_S:
            await asyncio.sleep(fault.delay * LENGTH_S[fault.moment])
        struck = await self._strike(fault, replica)
        self._struck.append(struck)
        self._say(f"{fault}: {struck.moment}, pids {struck.pids}")
        follows = self._leads(fault)
        return follows or await self._goes_on(struck)

    def _leads(self, fault: Fault) -> bool:
        """True if the next fault comes while this one is being mended."""
        return fault.number in self.leading

    leading: frozenset[int] = frozenset()
    """Numbers of faults that bring about the moment of the next."""

    async def _chosen(self, fault: Fault) -> int | None:
        """The replica that a fault strikes, once all replicas run of the service that it belongs to, so that a second
        one serves meanwhile; None for other kinds."""
        application = application_of(fault.kind)
        if application is None:
            return None
        found: list[int] = []

        async def whole() -> bool:
            with contextlib.suppress(OSError, KeyError):
                running = (await asyncio.to_thread(serving, self._quartet))[application]
                found[:] = sorted(set(running) - self._hit)
                return len(found) == replicas_of(self._quartet, application)
            return False

        if not await self._eventually(whole, WHOLE_S, f"not all replicas of {application} run again"):
            return found[0] if found else None
        return random.Random(fault.number).choice(found)

    async def _newcomer(self, fault: Fault) -> int | None:
        """The successor of a replica that was killed, while it starts."""
        application = application_of(fault.kind)
        assert application is not None
        known: set[int] = set(self._struck[-1].pids)
        with contextlib.suppress(OSError, KeyError):
            known |= set((await asyncio.to_thread(serving, self._quartet))[application])
        found: list[int] = []

        async def starts() -> bool:
            found[:] = await asyncio.to_thread(starting, self._quartet, application, known)
            return bool(found)

        await self._eventually(starts, WHOLE_S, f"no successor of {application} starts")
        return found[0] if found else None

    async def _moment(self, fault: Fault) -> None:
        """Waits for what the fault's moment names, but not for ever: the run may never come to it."""
        run = self._run
        returns, trained = run.returns, await self._trained()
        end = time.monotonic() + MOMENT_S.get(fault.moment, 0.0)
        while time.monotonic() < end:
            self._watch()
            match fault.moment:
                case "push":
                    come = await self._trained() > trained
                case "checkpoint":
                    come = run.writes
                case _:
                    come = run.returns > returns
            if come:
                return
            await asyncio.sleep(0.005)

    async def _trained(self) -> int:
        """The last step of the critic; 0 if it does not answer."""
        with contextlib.suppress(ServiceError):
            return (await self._quartet.critic.info(1)).last_step
        return 0

    async def _strike(self, fault: Fault, replica: int | None) -> Struck:
        run = self._run
        run.look()
        moment = f"after step {run.best}, {time.monotonic() - run.began:.1f} s after the start of its process"
        self._returns = run.returns
        if fault.kind == "orchestrator":
            return await self._strike_orchestrator(fault, moment)
        application = application_of(fault.kind)
        pids: list[int] = []

        async def there() -> bool:
            pids[:] = await asyncio.to_thread(victims, self._quartet, fault.kind, replica)
            return bool(pids)

        if application is None or replica is not None:
            await self._until(there, APPEARS_S)
        at = time.monotonic()
        if replica is not None and fault.kind != "critic rank":  # a critic may go on with new ranks
            self._hit.add(replica)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                if fault.action == "kill":
                    os.kill(pid, signal.SIGKILL)
                else:
                    os.kill(pid, signal.SIGSTOP)
                    self._frozen[pid] = at + FROZEN_S
        return Struck(fault, pids, moment, at)

    async def _strike_orchestrator(self, fault: Fault, moment: str) -> Struck:
        at = time.monotonic()
        if fault.action == "kill":
            await asyncio.to_thread(self._run.kill)
            pid = self._run.pid
            self._run.start()
        else:
            pid = self._run.pid
            self._run.signal(signal.SIGSTOP)
            await asyncio.sleep(fault.frozen_s)
            self._run.signal(signal.SIGCONT)
        return Struck(fault, [pid], moment, at)

    async def _goes_on(self, struck: Struck) -> bool:
        """Watches until the run is some steps further; False if it is stuck."""
        run, goal = self._run, self._run.best + ON

        async def further() -> bool:
            return run.best >= goal

        went_on = await self._eventually(further, STUCK_S, "no progress")
        frozen_s = (
            struck.fault.frozen_s if (struck.fault.kind, struck.fault.action) == ("orchestrator", "freeze") else 0
        )
        struck.gap_s = run.longest_gap(struck.at) - frozen_s
        struck.returns = run.returns - self._returns
        self._say(f"    {struck.gap_s:.1f} s without progress, {struck.returns} returns, step {run.best}")
        return went_on

    async def _eventually(self, check: Callable[[], Awaitable[bool]], timeout_s: float, problem: str) -> bool:
        """Waits until `check` holds; notes the problem if it never does."""
        if await self._until(check, timeout_s):
            return True
        self._note(f"{problem} for {timeout_s:g} s\n{self._run.last_words()}")
        return False

    async def _until(self, check: Callable[[], Awaitable[bool]], timeout_s: float) -> bool:
        """Waits until `check` holds, while it keeps an eye on the run; False if it does not in time."""
        end = time.monotonic() + timeout_s
        while True:
            self._watch()
            if await check():
                return True
            if time.monotonic() > end:
                return False
            await asyncio.sleep(0.05)

    def _watch(self) -> None:
        """Notes progress, and an end of the run by itself, after which it is resumed."""
        run = self._run
        run.look()
        self._look_at_frozen()
        code = run.ended
        if code is not None:
            self._note(f"the run ended by itself, with exit code {code}:\n{run.last_words()}")
            self._ends = self._ends + 1 if run.best == self._ended_at else 1
            self._ended_at = run.best
            if self._ends == MOST_ENDS:
                raise Hopeless
            run.start()

    def _look_at_frozen(self) -> None:
        """Notes and kills frozen processes that should have been ended by now."""
        now = time.monotonic()
        for pid, until in list(self._frozen.items()):
            if not psutil.pid_exists(pid) or _is_zombie(pid):
                del self._frozen[pid]
            elif now > until:
                self._note(f"process {pid} stood still for {FROZEN_S:g} s, and nothing ended it")
                self._kill(pid)

    def _kill(self, pid: int) -> None:
        del self._frozen[pid]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _note(self, problem: str) -> None:
        last = f"{self._struck[-1].fault}, {self._struck[-1].moment}" if self._struck else "before the first fault"
        self._problems.append(f"{last}: {problem}")
        if self._struck:
            self._struck[-1].problems.append(problem.splitlines()[0])
        self._say(f"PROBLEM {self._problems[-1]}")

    async def _finish(self) -> None:
        """Gives the run an end, which it has to reach."""
        run = self._run
        await asyncio.to_thread(run.kill)
        run.look()
        run.write(run.best + LAST)
        run.start()
        end = time.monotonic() + PATIENCE_S
        while (code := run.ended) is None:
            if time.monotonic() > end:
                self._note(f"the run does not reach its last step\n{run.last_words()}")
                return
            self._look_at_frozen()
            await asyncio.sleep(0.05)
        run.look()
        if code:
            self._note(f"the run ended by itself before its last step, with exit code {code}:\n{run.last_words()}")


def replicas_of(quartet: Quartet, application: str) -> int:
    """Number of replicas that were deployed of an application."""
    [deployed] = [each for each in quartet.raw["applications"] if each["name"] == application]
    [deployment] = deployed["deployments"]
    return int(deployment.get("autoscaling_config", {}).get("max_replicas") or deployment["num_replicas"])


def over_bound(outcome: Outcome) -> list[str]:
    """Frozen replicas that cost more than they may, such as a return to a checkpoint where calls are made again; also
    noted with the faults themselves."""
    wrong = []
    for struck in filter(lambda each: _is_bounded(each.fault), outcome.struck):
        told = []
        if (cost := outcome.cost_s(struck)) > MOST_S:
            told.append(f"cost {cost:.1f} s, and may cost {MOST_S:g}")
        if struck.returns and struck.fault.kind in ASKED_AGAIN:
            told.append(f"cost {struck.returns} returns to a checkpoint, and may cost none")
        struck.problems += told
        wrong += [f"{struck.fault}, {struck.moment}: {problem}" for problem in told]
    return wrong


def _is_bounded(fault: Fault) -> bool:
    """True for a frozen replica, struck while the run trains."""
    return fault.moment in ("step", "push", "checkpoint") and fault.action == "freeze" and fault.kind in REPLICAS


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
