"""Counts the functions of Quartet through which one sample passes on its way from its prompt to a gradient.

    python -m tests.unit.sample_path

One step of one sample, in one process: the loop, its clients, gRPC, Serve's guarded port, the four replicas and their
models, and both learners are those of a run. vLLM answers by a script; Ray, which would carry calls to replicas and
ranks, and the push are left out.

A function counts if it is on the way to one of STOPS, where the sample leaves our code or changes its form: on the
stack at that moment, through awaits, and on the stacks at which the tasks and threads in between were begun. So
functions that only forward count, and helpers that a function on the way calls and that return do not.
"""

import asyncio
import contextlib
import os
import pickle
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import grpc
import numpy as np
from vllm.logprobs import FlatLogprobs, Logprob

from orchestrator.clients import Services
from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.prompts import Prompt, PromptStream
from orchestrator.experience.collector import Collector
from orchestrator.experience.journal import ExperienceJournal
from orchestrator.experience.source import ExperienceSource
from orchestrator.learners import CriticLearner, PolicyLearner
from orchestrator.loop.state import TrainState
from orchestrator.loop.trainer import Trainer
from orchestrator.monitoring.record import Record
from orchestrator.policy.early import EarlyLogprobs
from orchestrator.policy.ranks import Policy
from orchestrator.policy.trainer import PolicyTrainer
from orchestrator.tracing.spans import UNTRACED
from orchestrator.tracing.waits import Waits
from quartet.config.limits import LimitsConfig
from quartet.models.distribution import Distribution
from quartet.ranks.group import RankGroup
from quartet.ranks.thread_rank import ThreadRank
from quartet.security.port import CALLBACK, CALLBACK_VARIABLE, Port
from quartet.serving.admission import Admission
from quartet.serving.slots import EngineSlots
from quartet.wire.client import open_channel
from services.critic.client import CriticClient
from services.reference.client import ReferenceClient
from services.reference.config import ReferenceConfig
from services.reference.replica import Reference
from services.reward.client import RewardClient
from services.reward.config import RewardConfig
from services.reward.replica import Reward
from services.rollout.client import RolloutClient
from services.rollout.config import RolloutConfig
from services.rollout.member import WeightMember
from services.rollout.pulse import Pulse
from services.rollout.replica import Rollout
from services.rollout.vllm.engine import VLLMEngine
from tests.models import MAX_LENGTH, ROWS, make_policy, make_reward
from tests.unit import critic_calls
from tests.unit.fake_run import FakeCheckpoints, FakeLog, FakeProgress, FakePusher
from tests.unit.fakes import Journal
from tests.unit.front_door import Replicas, front_door
from tests.unit.member_phases import LEASE, claim

ROOT = Path(__file__).parents[2]
OURS = tuple(f"{ROOT / name}/" for name in ("orchestrator", "quartet", "services"))
STOPS: dict[tuple[str, str], str] = {
    ("grpc/aio/_channel.py", "UnaryStreamMultiCallable.__call__"): "prompt sent",
    ("quartet/security/gate.py", "Gate.admit"): "caller admitted",
    ("quartet/serving/door/checked.py", "parsed"): "request checked",
    ("tests/unit/sample_path.py", "Behind._replica"): "port passed",
    ("quartet/serving/fair_queue.py", "FairQueue.add"): "in a queue",
    ("quartet/serving/fair_queue.py", "FairQueue.take"): "out of a queue",
    ("tests/unit/sample_path.py", "Script.generate"): "sampled",
    ("services/rollout/sample.py", "Sample.to_wire"): "sample sent",
    ("services/rollout/sample.py", "from_wire"): "sample read",
    ("quartet/trajectory.py", "columns_of"): "in columns",
    ("grpc/aio/_channel.py", "UnaryUnaryMultiCallable.__call__"): "trajectory sent",
    ("transformers/models/llama/modeling_llama.py", "LlamaModel.forward"): "forward pass",
    ("services/reward/encoding.py", "ScoreCall.put"): "score stored",
    ("quartet/serving/token_call.py", "TokenCall.put"): "numbers stored",
    ("quartet/columns.py", "Columns.concatenate"): "in a batch",
    ("quartet/folders.py", "_write_new"): "in the journal",
    ("orchestrator/algorithms/rewards.py", "shape_rewards"): "rewards",
    ("orchestrator/algorithms/advantages.py", "gae"): "advantages",
    ("orchestrator/algorithms/advantages.py", "whiten"): "advantages whitened",
    ("orchestrator/algorithms/loss.py", "policy_loss"): "policy's loss",
    ("quartet/models/numerics.py", "value_loss"): "critic's loss",
    ("deepspeed/runtime/engine.py", "DeepSpeedEngine.backward"): "gradient",
    ("deepspeed/runtime/engine.py", "DeepSpeedEngine.step"): "optimizer step",
}
"""End of a file's path and qualified name of a function -> what has happened to the sample there."""

Function = tuple[str, str]
"""A file below the root, and the qualified name of a function in it."""
_begun_at: ContextVar[tuple[Function, ...]] = ContextVar("begun_at", default=())
"""Functions on the stack at which the present task or thread was begun, and on those before it."""


@dataclass
class SamplePath:
    """The functions that were on the way to each stop."""

    functions: dict[str, dict[Function, None]] = field(default_factory=dict)
    _stops: dict[CodeType, str] = field(default_factory=dict)

    @property
    def whole(self) -> set[Function]:
        """All of them."""
        return {function for functions in self.functions.values() for function in functions}

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Context in which calls are recorded, in tasks and threads that begin in it too."""
        loop = asyncio.get_running_loop()
        run_in_executor, to_thread = loop.run_in_executor, asyncio.to_thread

        def begin_thread(executor: Any, function: Callable[..., Any], *arguments: Any) -> Any:
            return run_in_executor(executor, _inherited().run, self._run, function, *arguments)

        async def thread(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            return await begin_thread(None, partial(function, *arguments, **options))

        loop.set_task_factory(
            lambda loop, work, **options: asyncio.Task(work, loop=loop, context=_inherited(options))
        )
        loop.run_in_executor = begin_thread  # type: ignore[method-assign, assignment]
        asyncio.to_thread = thread  # type: ignore[assignment]
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            asyncio.to_thread = to_thread
            loop.run_in_executor = run_in_executor  # type: ignore[method-assign]
            loop.set_task_factory(None)

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs the function in a thread, which may be older than the recording."""
        sys.setprofile(self._note)
        try:
            return function(*arguments)
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        stop = self._stops.get(frame.f_code)
        if stop is None:
            stop = self._stops[frame.f_code] = _stop(frame.f_code)
        if stop:
            self.functions.setdefault(stop, {}).update(dict.fromkeys(_on_the_way(frame)))


def _stop(code: CodeType) -> str:
    """The stop that a function is; empty if it is another function."""
    for (file, name), stop in STOPS.items():
        if code.co_qualname == name and code.co_filename.endswith(file):  # type: ignore[attr-defined]  # since 3.11
            return stop
    return ""


def _on_the_way(frame: FrameType | None) -> Iterator[Function]:
    """Our functions on the stack, outermost last, and then those that began its task or thread."""
    while frame is not None:
        code = frame.f_code
        name: str = code.co_qualname  # type: ignore[attr-defined]
        if code.co_filename.startswith(OURS) and not name.endswith(">"):  # not a lambda or a comprehension
            yield str(Path(code.co_filename).relative_to(ROOT)), name
        frame = frame.f_back
    yield from _begun_at.get()


def _inherited(options: Any = None) -> Any:
    """The context of a task or thread that begins here."""
    context = (options or {}).get("context") or copy_context()
    context.run(_begun_at.set, tuple(dict.fromkeys(_on_the_way(sys._getframe(2)))))
    return context


class Script:
    """vLLM, which answers with four tokens at once."""

    model_config = SimpleNamespace(enable_sleep_mode=False, get_vocab_size=lambda: ROWS, max_model_len=MAX_LENGTH)

    async def check_health(self) -> None:
        """Finds nothing wrong."""

    async def get_weight_version(self) -> str:
        """The version of its response."""
        return "1"

    async def generate(self, prompt: Any, params: Any, name: str) -> AsyncIterator[Any]:
        """One output, of version 1."""
        ids = [10, 11, 12, 13]
        logprobs = FlatLogprobs()
        logprobs.extend({token: Logprob(-2.0)} for token in ids)
        versions = [SimpleNamespace(version="1", start=0, end=len(ids))]
        yield SimpleNamespace(
            outputs=[
                SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason="stop", weight_versions=versions)
            ]
        )


@dataclass
class Behind(Replicas):
    """Passes calls on to replicas, as Serve does."""

    replicas: dict[str, Any] = field(default_factory=dict)

    def make(self, service_method: str, streaming_type: Any) -> Any:
        """The handler of a method."""
        name = service_method.rpartition("/")[2]

        async def unary(request: Any, context: Any) -> bytes:
            answer = await self._replica(name, context)(pickle.loads(pickle.dumps(request)), context)
            return bytes(answer.SerializeToString())

        async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
            async for answer in self._replica(name, context)(pickle.loads(pickle.dumps(request)), context):
                yield answer.SerializeToString()

        return stream if name == "Generate" else unary

    def _replica(self, method: str, context: Any) -> Any:
        return getattr(self.replicas[dict(context.invocation_metadata())["application"]], method)


def _made(deployment: Any) -> Any:
    """A replica without Serve, before its constructor is called."""
    return object.__new__(deployment.func_or_class)


async def _rollout(policy: Path) -> Any:
    """A rollout replica, whose engine has the script in vLLM's place. Its constructor would ask Serve for others."""
    engine = VLLMEngine(Script(), RolloutConfig(model=str(policy), dtype="float32"))  # type: ignore[arg-type]
    engine.version = 1
    engine.shutdown = lambda: None  # type: ignore[method-assign]
    replica, limits = _made(Rollout), LimitsConfig()
    replica._engine, replica._replica = engine, "a"
    replica._admission, replica._slots = Admission(limits), EngineSlots(4, limits, quantum=64)
    replica._member = WeightMember(engine, "a", host="127.0.0.1")
    replica._pulse = Pulse(engine.answer, lambda: False)
    assert (await claim(replica._member, LEASE)).ok
    replica._member._timeline = LEASE.number  # as if a push had come
    return replica


async def _replicas(policy: Path, reward: Path, folder: Path) -> dict[str, Any]:
    """The four replicas, by application."""
    scorer = {"kind": "model", "model": str(reward), "dtype": "float32"}
    scoring, reference = _made(Reward), _made(Reference)
    scoring.__init__(RewardConfig.parse({"tokenizer": str(policy), "scorer": scorer}, "reward.args").hosted[""])
    reference.__init__(ReferenceConfig.parse({"model": str(policy), "dtype": "float32"}, "reference.args"))
    critic = await critic_calls.start(policy, folder)
    return {"rollout": await _rollout(policy), "reward": scoring, "reference": reference, "critic": critic}


async def sample_path(policy: Path, reward: Path, folder: Path) -> SamplePath:
    """The path of one sample.

    Args:
        policy: folder of the policy, which is the reference and the start of the critic too.
        reward: folder of the reward model.
        folder: folder for what a run writes.
    """
    config = OrchestratorConfig.parse(
        {
            "name": "path",
            "data": {"path": "prompts"},
            "policy": {"model": str(policy), "optimizer": {"learning_rate": 1e-4}},
            "batch_size": 1,
            "steps": 1,
            "algorithm": {"kind": "ppo", "minibatch_size": 1, "epochs": 1},
            "sampling": {"max_new_tokens": 8},
            "loop": {"mismatch_limit": 100.0},
            "evaluation": {"every": 0},
        },
        "orchestrator",
    )
    prompts = PromptStream([Prompt(0, np.asarray([1, 8, 9], np.int32), "w8 w9", "")], config.seed)
    ranks, journal, path = RankGroup("policy", [ThreadRank(60)]), Journal(), SamplePath()
    replicas = await _replicas(policy, reward, folder)
    arguments = config.scheduled_policy, config.algorithm, Distribution(1.0)
    await ranks.start(PolicyTrainer, *arguments, timeout_s=60)
    async with (
        front_door(Port(local="open"), kind=partial(Behind, replicas=replicas)) as (target, _),
        open_channel(target) as channel,
    ):
        services = _clients(channel)
        assert services.critic is not None
        await services.critic.claim(critic_calls.OURS, 60, 10)
        await services.critic.adopt(0, 10)
        learner = Policy(ranks, config)
        collector = Collector(services, config, old_logprobs=EarlyLogprobs(learner))
        trainer = Trainer(
            config,
            ExperienceSource(config, prompts, collector, ExperienceJournal(folder / "journal", config)),
            learner,
            [PolicyLearner(learner, config), CriticLearner(services.critic, config, 0)],
            FakePusher(journal),
            FakeCheckpoints(journal),  # type: ignore[arg-type]
            None,
            Record(FakeLog(journal), FakeProgress(), 1),  # type: ignore[arg-type]
            Waits(UNTRACED),
        )
        with path.recorded():
            state = TrainState(step=0, first_version=1, first_critic_step=0, kl_coef=0.1)
            await trainer.run(state, folder / "saved")
    ranks.stop()
    replicas["critic"]._critic.stop()
    return path


def _clients(channel: grpc.aio.Channel) -> Services:
    rollout = RolloutClient(channel)
    rollout.lease = LEASE
    return Services(rollout, RewardClient(channel), ReferenceClient(channel), CriticClient(channel))


def described(path: SamplePath) -> str:
    """A line for each stop, and the sums."""
    seen: set[Function] = set()
    lines = [f"{'':22}frames  new"]
    for stop, functions in path.functions.items():
        new = functions.keys() - seen
        seen |= new
        lines.append(f"{stop:22}{len(functions):6}{len(new):5}")
    return "\n".join([*lines, f"{len(path.whole)} functions in {len({file for file, _ in path.whole})} files"])


def main() -> None:
    """Prints the count, and every function."""
    os.environ.setdefault(CALLBACK_VARIABLE, CALLBACK)  # replicas without Serve refuse to be unguarded
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        policy = make_policy(folder / "policy", kind="llama", tied=False)
        path = asyncio.run(sample_path(policy, make_reward(folder / "reward"), folder))
    for file, name in sorted(path.whole):
        print(f"{file}: {name}")
    print(described(path))


if __name__ == "__main__":
    main()
