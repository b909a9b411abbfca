"""The real services under faults, while a loop pushes and generates as training does.

Processes are really killed (SIGKILL) and frozen (SIGSTOP). After each fault the loop goes on, every sample that was
asked for is used once, and when Serve has replaced what was lost all replicas serve the same bytes. Each test prints
how long the loop was held up, and after what time the service was whole again.
"""

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import psutil
import pytest
import ray
import yaml

from orchestrator.commands.up import consequences
from orchestrator.deployment import serving
from orchestrator.deployment.file import Deployment
from orchestrator.deployment.redeployment import fixed
from orchestrator.push.newcomers import registered
from protos import rollout_pb2 as pb
from quartet.wire.codec import pack_sequences
from quartet.wire.errors import Unavailable
from services.rollout.sample import Sampling
from tests import plain
from tests.cluster import REPLACED_S, Quartet, engine_of, eventually, named, rollouts, whole
from tests.listening import Listener
from tests.newcomers import adding_newcomers, once
from tests.pushing import ModelSource, hold, make_pusher, perturbed

PROMPTS, _ = plain.random_pairs(32, seed=31, longest=20)
LONG = Sampling(max_new_tokens=100, ignore_eos=True)
TRAINING_S = 1.5
"""Stands for an update of the policy; meanwhile replicas that are started, and other tests, have the cores."""


class Loop:
    """Training without the training: new weights, a push, and samples from no older weights, for ever."""

    def __init__(self, quartet: Quartet, version: int) -> None:
        self._quartet = quartet
        self._version = version
        self.source = ModelSource(plain.language_model(quartet.policy))
        self._model = plain.language_model(quartet.policy)
        self.pusher = make_pusher(quartet.services.rollout, self.source, attempts=4, patience_s=REPLACED_S)
        self.steps = 0
        self.longest = 0.0
        """Seconds of the slowest step."""
        self.repeated = 0

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            await self.step()
            await asyncio.sleep(TRAINING_S)
            self.longest = max(self.longest, time.monotonic() - began)

    async def step(self) -> None:
        self._version += 1
        perturbed(self._model, seed=self._version)
        self.source.tensors = dict(self._model.named_parameters())
        self.report = await self.pusher.push(self._version)
        repeats: list[int] = []
        stream = self._quartet.services.rollout.generate(
            PROMPTS, LONG, min_version=self._version, timeout_s=120, stall_s=8, on_repeat=repeats.append
        )
        used = [sample async for some in stream for sample in some]
        assert sorted(sample.index for sample in used) == list(range(len(PROMPTS)))
        assert {sample.policy_version for sample in used} == {self._version}
        self.repeated += sum(repeats)
        self.steps += 1

    async def reaching(self, replicas: int) -> None:
        """Waits until a push that began from now on reaches so many replicas."""
        began = self.steps

        async def reached() -> bool:
            return self.steps > began + 1 and len(self.report.replicas) == replicas

        await eventually(reached, REPLACED_S)

    async def further(self, steps: int = 2) -> None:
        """Waits until so many more steps are done."""
        goal = self.steps + steps

        async def reached() -> bool:
            return self.steps >= goal

        await eventually(reached, REPLACED_S)


@pytest.fixture
async def loop(quartet: Quartet, on_ray: None) -> AsyncIterator[Loop]:
    """Running, with two replicas; at the end it must not have failed, and all replicas serve what was last pushed."""
    await whole(quartet, 2)
    reports = await hold(quartet.services.rollout)
    loop = Loop(quartet, max(report.policy_version for report in reports))
    async with AsyncExitStack() as stack:
        desk = await stack.enter_async_context(registered("rollout", once))
        adding = adding_newcomers(loop.pusher, desk, quartet.services.rollout.lease, 0)
        await stack.enter_async_context(adding)
        running = asyncio.create_task(loop.run())
        await loop.further()
        loop.longest = 0.0
        yield loop
        took = await whole(quartet, quartet.rollout_replicas)
        await loop.further()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    await loop.step()
    infos = await quartet.replicas()
    assert {info.policy_version for info in infos.values()} == {loop.report.policy_version}
    assert {info.weights_checksum for info in infos.values()} == {loop.report.checksum}
    print(f"\nheld up for {loop.longest:.1f} s, {loop.repeated} samples asked again, whole after {took:.0f} s more")


def scale(quartet: Quartet, scaling: dict[str, Any]) -> list[str]:
    """Scales as a user does: other bounds in the YAML, deployed again. Returns what `quartet up` says before."""
    quartet.raw["applications"][0]["deployments"][0] |= scaling
    path = quartet.folder / "scaled.yaml"
    path.write_text(yaml.safe_dump(quartet.raw))
    said = consequences(quartet.cluster, Deployment.load(path, check_services=True)).told
    serving.deploy(quartet.cluster, path)
    return said


async def test_a_replica_killed_in_the_middle_of_a_transfer(quartet: Quartet, loop: Loop) -> None:
    """Responses that it had begun go on at the other one, from the tokens that came until the pause for the push. Its
    engine ends with it."""
    listeners = [Listener(quartet.channel, PROMPTS * 10, LONG) for _ in range(2)]
    killed, pids = threading.Event(), rollouts(quartet)
    engines, lost = {replica: psutil.Process(engine_of(pid)) for replica, pid in pids.items()}, list[str]()

    def kill() -> None:
        end = time.monotonic() + 3  # replicas send what they have at least every two seconds
        while not (begun := [name for listener in listeners for name in listener.unfinished()]):
            if time.monotonic() > end:
                loop.source.midway = kill  # all responses had just ended, so at another push
                return
            time.sleep(0.05)
        lost.append(begun[0])
        psutil.Process(pids[lost[0]]).kill()
        killed.set()

    async def is_killed() -> bool:
        return killed.is_set()

    async with asyncio.TaskGroup() as group:
        for listener in listeners:
            group.create_task(listener.run(killed))
        for listener in listeners:
            await listener.heard.wait()
        loop.source.midway = kill
        await eventually(is_killed, REPLACED_S)
        await loop.further(3)
    assert loop.source.midway is None
    await asyncio.to_thread(engines[lost[0]].wait, 60)
    samples = [sample for listener in listeners for sample in listener.samples]
    resumed = [sample for sample in samples if sample.kept]
    print(f"\n{len(resumed)} of {len(samples)} samples went on elsewhere after {sum(s.kept for s in resumed)} tokens")
    assert resumed
    for sample in samples:
        assert len(sample.response_ids) == len(sample.logprobs) == 100
        assert [0, *(end for _, _, end in sample.spans)] == [*(start for _, start, _ in sample.spans), 100]


async def test_a_replica_frozen_with_its_engine(quartet: Quartet, loop: Loop) -> None:
    """Nothing closes a connection: only deadlines, heartbeats and health checks find it. Serve replaces it."""
    replica, victim = next(iter(rollouts(quartet).items()))
    frozen = [psutil.Process(engine_of(victim)), psutil.Process(victim)]
    for process in frozen:
        process.suspend()
    try:
        await loop.further(3)

        async def replaced() -> bool:
            return replica not in rollouts(quartet)

        await eventually(replaced, REPLACED_S)
    finally:
        for process in frozen:
            if process.is_running():
                process.send_signal(signal.SIGCONT)


async def test_a_newcomer_that_dies_while_it_joins_is_waited_for_until_ray_knows(
    quartet: Quartet, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner would wait for it until a deadline, and the loop's next push with it."""
    add, failures = loop.pusher.add_newcomers, []

    async def lose(applicants: Any, deliver: Any, first_death: Any) -> None:
        async def kill(tickets: Any) -> None:
            monkeypatch.undo()
            for name in tickets:
                ray.kill(applicants[name].actor)
            await deliver(tickets)

        try:
            await add(applicants, kill, first_death)
        except Unavailable as error:
            failures.append(str(error))
            raise

    monkeypatch.setattr(loop.pusher, "add_newcomers", lose)
    replica, victim = next(iter(rollouts(quartet).items()))
    psutil.Process(victim).kill()
    await loop.reaching(2)
    [failure] = failures
    newcomer, _, said = failure.partition(" ")
    assert newcomer != replica
    assert newcomer not in rollouts(quartet)
    assert said == "died while it joined"


async def test_the_controller_and_the_proxy_of_serve_are_killed(quartet: Quartet, loop: Loop) -> None:
    for name in ("ray::ServeController", "ray::ProxyActor"):
        named(quartet, name).kill()
    await loop.further(3)


async def test_serve_scales_up_and_down_while_the_loop_goes_on(quartet: Quartet, loop: Loop) -> None:
    """No replica is restarted where bounds change. The one that Serve adds holds the run's weights before it is
    RUNNING, and samples with them; when it is taken away, no sample is lost."""
    before = rollouts(quartet)
    scaling = {"min_replicas": 2, "max_replicas": 3, "look_back_period_s": 2, "aggregation_function": "max"}
    up = {"target_ongoing_requests": 0.1, "upscale_delay_s": 0, "downscale_delay_s": 600}
    said = scale(quartet, {"autoscaling_config": scaling | up})
    assert said == ["rollout: from 2 replicas to 2 to 3 replicas; those that stay are not restarted"]
    took = await whole(quartet, 3)
    print(f"\n3 replicas after {took:.0f} s")
    now = rollouts(quartet)
    [added] = now.keys() - before.keys()
    assert now | before == now  # the same processes
    infos = await quartet.replicas(3)
    old = infos[next(iter(before))]
    assert infos[added].timeline == old.timeline
    assert abs(infos[added].policy_version - old.policy_version) <= 1  # a push may be between the two answers
    await loop.reaching(3)
    version, checksum = loop.report.policy_version, loop.report.checksum
    assert (await quartet.replicas(3))[added].checksums[version] == checksum
    assert min(await sampled_by(quartet, added)) >= version
    down = {"target_ongoing_requests": 1000, "downscale_delay_s": 0}
    said = scale(quartet, {"autoscaling_config": scaling | down})
    assert said == ["rollout: changes in place; no replica is restarted"]
    took = await whole(quartet, 2)
    print(f"\n2 replicas after {took:.0f} s")
    await loop.reaching(2)
    scale(quartet, fixed(2))
    assert len(before.items() & rollouts(quartet).items()) >= 1


async def sampled_by(quartet: Quartet, replica: str) -> set[int]:
    """Versions of this replica's samples, of three pushes."""
    request = pb.GenerateRequest(prompts=pack_sequences(PROMPTS), sampling=pb.SamplingParams(max_new_tokens=20))
    versions: set[int] = set()

    async def seen() -> bool:
        answers = await quartet.stream("/quartet.v1.Rollout/Generate", request, pb.GenerateResponse, "rollout")
        ended = [s for a in answers if a.replica == replica for s in a.segments if s.finish_reason]
        versions.update(segment.spans[-1].policy_version for segment in ended)
        return len(versions) > 2

    await eventually(seen, REPLACED_S)
    return versions


@pytest.mark.exhaustive  # by Serve itself: the test above
async def test_scaling_up_and_down_while_the_loop_goes_on(quartet: Quartet, loop: Loop) -> None:
    """Newcomers hold the pushed version before they are RUNNING, or the loop would notice."""
    for count in (4, 1, 3, 2):
        scale(quartet, fixed(count))
        took = await whole(quartet, count)
        # One that is stopped in the middle of a push leaves the others waiting for it: they may miss the next pushes.
        await loop.reaching(count)
        print(f"\n{count} replicas after {took:.0f} s")


@pytest.fixture(scope="module", autouse=True)
def as_it_was(quartet: Quartet) -> Any:
    """Other modules find two replicas."""
    yield
    assert quartet.rollout_replicas == 2
