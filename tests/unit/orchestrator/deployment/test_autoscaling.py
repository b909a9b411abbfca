"""The `autoscaling_config` of docs/services.md under Serve's own autoscaler, while a run samples and trains."""

import random
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ray.serve import autoscaling_policy
from ray.serve._private import autoscaling_state
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import (
    RUNNING_REQUESTS_KEY,
    DeploymentHandleSource,
    DeploymentID,
    HandleMetricReport,
    ReplicaID,
    TimeStampedValue,
)
from ray.serve._private.config import DeploymentConfig, ReplicaConfig
from ray.serve._private.constants import RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.config import AutoscalingConfig

ROLLOUT = DeploymentID("Rollout", "rollout")
START_S = 40
"""Seconds that a new replica takes to start."""
Calls = Callable[[float, int], int]
"""Calls under way, from the time in seconds and the number of replicas that run."""


class _Replica:
    """Stands for the deployment's class."""


def replicas_over_time(
    patch: pytest.MonkeyPatch, scaling: Mapping[str, Any], calls: Calls, seconds: int
) -> list[int]:
    """The number of replicas that Serve wants after each second, with an `autoscaling_config` and these calls."""
    now = 1e9
    clock = SimpleNamespace(time=lambda: now, monotonic=lambda: now)
    for module in (autoscaling_state, autoscaling_policy):
        patch.setattr(module, "time", clock)
    config = AutoscalingConfig.model_validate(scaling)
    state = DeploymentAutoscalingState(ROLLOUT)
    deployment = DeploymentConfig(autoscaling_config=config)
    info = DeploymentInfo(deployment, ReplicaConfig.create(_Replica), 0, "job", version="1")
    wanted = state.register(info, 1)
    started: list[tuple[float, ReplicaID]] = []
    # As Serve's proxies do: they look at intervals, keep what they saw, and tell the controller at other intervals.
    every = min(config.look_back_period_s * RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR, 10.0)
    seen: list[TimeStampedValue] = []
    look, tell = now, now + config.metrics_interval_s
    targets = []
    for second in range(seconds):
        while len(started) < wanted:
            ready = now if not started else now + START_S
            started.append((ready, ReplicaID(f"{len(started)}-{second}", deployment_id=ROLLOUT)))
        del started[wanted:]
        running = [replica for ready, replica in started if ready <= now]
        state.update_running_replica_ids(running)
        if now >= look:
            look += every
            seen.append(TimeStampedValue(now, calls(second, len(running))))
            seen = [point for point in seen if point.timestamp >= now - config.look_back_period_s]
        if now >= tell:
            tell += config.metrics_interval_s
            state.record_request_metrics_for_handle(
                HandleMetricReport(
                    deployment_id=ROLLOUT,
                    handle_id="proxy",
                    actor_id="proxy",
                    handle_source=DeploymentHandleSource.PROXY,
                    queued_requests=[],
                    metrics={RUNNING_REQUESTS_KEY: {running[0].to_full_id_str(): list(seen)}},
                    timestamp=now,
                )
            )
        wanted = state.get_decision_num_replicas(wanted)
        targets.append(wanted)
        now += 1
    return targets


def run(calls: int, step_s: float, share: float, seconds: int) -> Calls:
    """The calls of a run at lock-step, which ends after `seconds`.

    Args:
        calls: Generate calls of a step, all at the same time.
        step_s: duration of a step with one replica; more replicas sample faster.
        share: share of the step that samples; then the learners work, and a push of a second reaches every replica.
        seconds: duration of the run.
    """
    rng = random.Random(0)
    began, sampled, ends = 0.0, 0.0, 0.0

    def under_way(now: float, replicas: int) -> int:
        nonlocal began, sampled, ends
        if now >= seconds:
            return 0
        while now >= ends:
            began, varied = ends, rng.uniform(0.9, 1.1)  # no two steps take the same time
            sampled = began + varied * step_s * share / replicas
            ends = sampled + varied * step_s * (1 - share)
        if now < sampled:
            return calls
        # One call reaches one replica, which calls all.
        return 1 + replicas if now >= ends - 1 else 0

    return under_way


def changes(targets: list[int]) -> list[int]:
    """The numbers of replicas one after the other."""
    return [targets[0]] + [now for before, now in pairwise(targets) if now != before]


def recommended() -> dict[str, Any]:
    """The values on the page, as a reader copies them."""
    text = (Path(__file__).parents[4] / "docs/services.md").read_text()
    [block] = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.S) if "look_back_period_s" in block]
    scaling: dict[str, Any] = yaml.safe_load(block)["autoscaling_config"]
    return scaling


STEPS = [(2, 0.2), (7, 0.5), (10, 0.5), (30, 0.8), (60, 0.2), (60, 0.5), (120, 0.5), (240, 0.5)]
"""Seconds of a step, and the share in which it samples."""
RUN_S, AFTER_S = 3600, 1800


@pytest.mark.parametrize(("step_s", "share"), STEPS)
def test_the_recommended_values_scale_up_once_and_down_once(
    step_s: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling = recommended()
    most = scaling["max_replicas"]
    calls = run(int(scaling["target_ongoing_requests"] * most), step_s, share, RUN_S)
    targets = replicas_over_time(monkeypatch, scaling, calls, RUN_S + AFTER_S)
    assert changes(targets) == [1, most, 1]
    assert targets.index(most) <= 2 * step_s + scaling["upscale_delay_s"] + 20
    assert targets[RUN_S] == most


def test_pushes_alone_ask_for_no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push is a call to each replica, and one more."""
    targets = replicas_over_time(monkeypatch, recommended(), lambda now, replicas: 1 + replicas, RUN_S)
    assert changes(targets) == [1]


def test_delays_shorter_than_a_step_flap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps with short delays, to see that this autoscaler can."""
    short = {"target_ongoing_requests": 1, "upscale_delay_s": 3, "downscale_delay_s": 10}
    scaling = {"min_replicas": 1, "max_replicas": 3} | short
    targets = replicas_over_time(monkeypatch, scaling, run(6, 30, 0.5, RUN_S), RUN_S)
    assert len(changes(targets)) > 50
