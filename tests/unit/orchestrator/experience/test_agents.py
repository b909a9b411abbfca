"""Agents: what a conversation is made of, and what becomes of those that fail, are late or change their history."""

import asyncio
import json
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.prompts import Prompt
from orchestrator.environments.agent import Agent, Task
from orchestrator.experience import user_function
from orchestrator.experience.agents import Agents
from orchestrator.experience.conversation import Conversation, trajectories
from orchestrator.experience.requests import SampleRequest
from protos import common_pb2
from quartet.config.base import ConfigError
from quartet.security.identity import Caller
from quartet.trajectory import Segment
from quartet.wire.callers import Purpose
from quartet.wire.codec import Ints
from quartet.wire.errors import InvalidReply, Unavailable
from services.rollout.client import RolloutClient
from services.rollout.session_client import SessionClient
from services.rollout.session_terms import terms_of
from services.rollout.session_trajectory import as_json
from services.rollout.sessions import MOST_OF_A_SESSION, Sessions
from tests.unit.fakes import make_config

ME = Caller("me", "trainer")
CIRCULAR: list[Any] = []
CIRCULAR.append(CIRCULAR)
REQUEST = SampleRequest(5, Prompt(2, np.asarray([7, 8], np.int32), "w7 w8", "w9", columns={"unit": "m"}), 77, 4)


def ids(*numbers: int) -> Ints:
    return np.asarray(numbers, np.int32)


@dataclass
class Door:
    """The paths of sessions, before real ones. Agents of tests record into them what a model would have sampled."""

    held: Sessions = field(default_factory=Sessions)
    started: list[dict[str, Any]] = field(default_factory=list)
    lost: int = 0
    """Sessions that are lost when their tokens are asked for."""
    requests: int = 0
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it answers."""
    busy: bool = False
    """True while it refuses everything."""

    def __post_init__(self) -> None:
        self.answers.set()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.requests += 1
        await self.answers.wait()
        if self.busy:
            return httpx.Response(503, text="busy")
        if request.url.path.endswith("/rl/start_session"):
            each = body.pop("sessions")
            names = [f"session-{len(self.started) + place}" for place in range(len(each))]
            self.started += [body | own for own in each]
            for name, own in zip(names, each, strict=True):
                self.held.start(ME.name, name, "t", own["task_id"], terms_of(body | own, ME))
            told: Any = {"sessions": [{"session_id": name, "api_key": name} for name in names], "model": "mine"}
        else:
            told = {"trajectories": self.held.trajectories(ME.name, body["session_ids"], body.get("remove_ids", ()))}
            for place in range(min(self.lost, len(body["session_ids"]))):
                self.lost -= 1
                told["trajectories"][place] = {"session_id": "", "error": "is not here"}
        return httpx.Response(200, text=as_json(told))

    def say(self, task: Task, prompt: Ints, *response: int, finish_reason: str = "stop") -> None:
        """Has the model say something to an agent."""
        sampled = Segment(ids(*response), np.full(len(response), -1, np.float32), ((3, 0, len(response)),))
        digest, number = b"", f"chat-{len(prompt)}"
        self.held.record(ME.name, task.api_key, number, prompt, sampled, digest, "c", finish_reason)


@pytest.fixture
def door() -> Door:
    return Door()


@pytest.fixture
def config(policy_folder: Path) -> OrchestratorConfig:
    return make_config(
        policy_folder,
        data={"path": "p.jsonl", "max_prompt_length": 16},
        sampling={"max_new_tokens": 8, "temperature": 0.7},
        agent={"kind": "a:b", "max_tokens": 40, "conversation_s": 30},
        timeouts={"generate_s": 20},
    )


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_function, "PAUSE_S", 0.0)


def client(door: Door, config: OrchestratorConfig) -> SessionClient:
    seconds = config.timeouts.generate_s
    return SessionClient("http://127.0.0.1:1/rollout", "key", seconds, httpx.MockTransport(door))


def with_agent(config: OrchestratorConfig, **keys: Any) -> OrchestratorConfig:
    assert config.agent is not None
    return config.model_copy(update={"agent": config.agent.model_copy(update=keys)})


BOUNDS: dict[str, Any] = {"version": None, "newest": None, "on_repeat": lambda count: None}


@asynccontextmanager
async def open_agents(
    door: Door, config: OrchestratorConfig, function: Callable[[Task], Any]
) -> AsyncIterator[Agents]:
    rollout = RolloutClient.__new__(RolloutClient)
    rollout.lease = common_pb2.Lease(run_id="mine-1", number=4, identity="me")
    async with client(door, config) as sessions:
        yield Agents(Agent("a:b", function, "digest"), config, sessions, rollout, Purpose.TRAINING)


async def converse(
    door: Door, config: OrchestratorConfig, function: Callable[[Task], Any], **bounds: int | None
) -> tuple[Conversation, int]:
    """A conversation, and how often it was begun again."""
    repeats: list[int] = []
    async with open_agents(door, config, function) as agents:
        given = BOUNDS | {"on_repeat": repeats.append} | bounds
        return await agents.converse(REQUEST, **given), sum(repeats)


async def test_what_was_sampled_and_what_was_given_are_segments(door: Door, config: OrchestratorConfig) -> None:
    tasks: list[Task] = []

    async def solve(task: Task) -> dict[str, int]:
        tasks.append(task)
        door.say(task, ids(7, 8, 5), 10, 11)
        door.say(task, ids(7, 8, 5, 10, 11, 6, 5), 12)
        return {"tries": 2}

    had, repeats = await converse(door, config, solve)
    assert [segment.ids.tolist() for segment in had.segments] == [[7, 8, 5], [10, 11], [6, 5], [12]]
    assert [segment.sampled for segment in had.segments] == [False, True, False, True]
    assert (had.turn, had.truncated, had.sampled, repeats) == (2, False, 3, 0)
    assert had.columns == {"unit": "m", "result": {"tries": 2}}
    [task] = tasks
    assert (task.base_url, task.model, task.seed) == ("http://127.0.0.1:1/rollout/v1", "mine", 77)
    assert (task.sample, task.row, task.prompt, task.label, task.columns) == (5, 2, "w7 w8", "w9", {"unit": "m"})
    assert "session" not in repr(task)
    assert door.held.counts()["sessions"] == 0


async def test_the_session_is_on_the_run_s_terms(door: Door, config: OrchestratorConfig) -> None:
    async def solve(task: Task) -> None:
        door.say(task, ids(7), 10)

    had, _ = await converse(door, config, solve, version=3, newest=4)
    assert had.columns == {"unit": "m"}
    assert door.started == [
        {
            **{"task_id": "sample 5", "purpose": "training", "temperature": 0.7, "max_tokens": 8, "max_length": 56},
            **{"kept_s": 50.0, "seed": 77, "min_version": 3, "max_version": 4},
            "lease": {"run_id": "mine-1", "number": 4},
        }
    ]


async def test_what_is_returned_is_as_it_was_then(door: Door, config: OrchestratorConfig) -> None:
    steps = [1]

    async def solve(task: Task) -> dict[str, Any]:
        door.say(task, ids(7), 10)
        return {"steps": steps}

    had, _ = await converse(door, config, solve)
    steps.append(2)
    assert had.result == {"steps": [1]}


async def test_a_conversation_that_failed_is_begun_again(door: Door, config: OrchestratorConfig) -> None:
    begun: list[str] = []

    async def solve(task: Task) -> None:
        begun.append(task.api_key)
        door.say(task, ids(7), 10 + len(begun))
        if len(begun) < 3:
            raise OSError("gone")

    had, repeats = await converse(door, config, solve)
    assert had.segments[1].ids.tolist() == [13]
    assert (len({*begun}), repeats) == (3, 2)
    assert door.held.counts()["sessions"] == 0


async def test_it_ends_the_run_by_name_at_its_last_attempt(door: Door, config: OrchestratorConfig) -> None:
    async def solve(task: Task) -> None:
        raise OSError("the sandbox is gone")

    said = r"agent a:b: sample 5, prompt row 2: failed with OSError\('the sandbox is gone'\) at line "
    said += rf"{solve.__code__.co_firstlineno + 1} of {__name__}, the last of 3 attempts "
    said += r"\(orchestrator.agent.conversation_s, attempts\)"
    with pytest.raises(ConfigError, match=said):
        await converse(door, config, solve)
    assert len(door.started) == 3
    assert door.held.counts()["sessions"] == 0


async def test_so_many_go_on_at_a_time_as_may(door: Door, config: OrchestratorConfig) -> None:
    going = most = 0

    async def solve(task: Task) -> None:
        nonlocal going, most
        going += 1
        most = max(most, going)
        await asyncio.sleep(0.01)
        door.say(task, ids(7), 10)
        going -= 1

    async with open_agents(door, with_agent(config, at_once=2), solve) as agents:
        await asyncio.gather(*(agents.converse(REQUEST, **BOUNDS) for _ in range(6)))
    assert (most, len(door.started)) == (2, 6)
    assert door.held.counts()["sessions"] == 0


@pytest.mark.parametrize(("most", "asked"), [(MOST_OF_A_SESSION, 32), (1, 96)], ids=["together", "one by one"])
async def test_those_that_begin_and_end_together_share_requests(
    door: Door, config: OrchestratorConfig, monkeypatch: pytest.MonkeyPatch, most: int, asked: int
) -> None:
    """Tokens for which an answer has no room are asked for again."""
    monkeypatch.setattr("services.rollout.sessions.MOST_OF_A_SESSION", most)

    async def solve(task: Task) -> None:
        door.say(task, ids(7), 100 + task.sample)

    requests = [replace(REQUEST, number=number, seed=number) for number in range(64)]
    async with open_agents(door, config, solve) as agents:
        had = await asyncio.gather(*(agents.converse(each, **BOUNDS) for each in requests))
    assert [each.request.number for each in had] == list(range(64))
    assert [each.segments[1].ids.tolist() for each in had] == [[100 + number] for number in range(64)]
    assert [each["seed"] for each in door.started] == list(range(64))
    assert door.requests < asked  # and not three for each
    assert door.held.counts()["sessions"] == 0


async def test_a_command_that_is_late_is_ended(door: Door, config: OrchestratorConfig) -> None:
    """The one of docs/extend.md."""
    # Started before the conversation, of which that could take the whole time.
    process = await asyncio.create_subprocess_exec("sleep", "600", env={"PATH": "/usr/bin:/bin"})

    async def solve(task: Task) -> int:
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()

    with pytest.raises(ConfigError, match=r"took longer than 0\.2 s"):
        await converse(door, with_agent(config, conversation_s=0.2, attempts=1), solve)
    assert await process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("responses", "result", "said"),
    [
        ([], None, "asked the model for nothing"),
        ([ids(7), ids(9)], None, r"had 2 sequences, and 1 is the most \(agent\.sequences\)"),
        ([ids(7)], float("nan"), "Out of range float values are not JSON compliant"),
        ([ids(7)], {1, 2}, "Object of type set is not JSON serializable"),
        ([ids(7)], CIRCULAR, "Circular reference detected"),
        ([ids(7)], "a" * 70_000, "returned 70002 characters of JSON, and 65536 is the most"),
        ([ids(7)], json.loads("[" * 40 + "]" * 40), "more than 32 levels deep"),
    ],
)
async def test_what_cannot_be_trained_on_is_a_failure(
    door: Door, config: OrchestratorConfig, responses: list[Ints], result: Any, said: str
) -> None:
    async def solve(task: Task) -> Any:
        for number, prompt in enumerate(responses):
            door.say(task, prompt, 10 + number)
        return result

    with pytest.raises(ConfigError, match=said):
        await converse(door, config, solve)


async def test_rewards_that_an_agent_sets_are_its_responses(door: Door, config: OrchestratorConfig) -> None:
    async def solve(task: Task) -> None:
        door.say(task, ids(7, 8), 10, 11)
        door.say(task, ids(7, 8, 10, 11, 5), 13)
        door.held.set_reward(ME.name, task.api_key, 0.5, "chat-2")  # of the first, by the length of its prompt
        door.held.set_reward(ME.name, task.api_key, 2.0, "")

    had, _ = await converse(door, config, solve)
    assert [(part.ids.tolist(), part.reward) for part in had.segments if part.sampled] == [
        ([10, 11], 0.5),
        ([13], 2.0),
    ]
    assert trajectories([had], turns=True)["turn_rewards"].tolist() == [0.0, 0.5, 2.0]


async def test_an_agent_may_have_several_sequences(door: Door, config: OrchestratorConfig) -> None:
    several = with_agent(config, sequences=3)

    async def solve(task: Task) -> None:
        door.say(task, ids(7, 8), 10, 11)
        door.say(task, ids(9), 12)  # it shortened its history
        door.say(task, ids(7, 8, 10, 11, 5), 13)  # and goes on with the first

    had, _ = await converse(door, several, solve)
    assert [(part.ids.tolist(), part.sampled, part.begins) for part in had.segments] == [
        ([7, 8], False, False),
        ([10, 11], True, False),
        ([5], False, False),
        ([13], True, False),
        ([9], False, True),
        ([12], True, False),
    ]
    assert had.turn == 3
    assert trajectories([had]).sequence_lengths.tolist() == [6, 2]

    async def more(task: Task) -> None:
        for number in range(4):
            door.say(task, ids(number), 10 + number)

    with pytest.raises(ConfigError, match=r"had 4 sequences, and 3 is the most"):
        await converse(door, several, more)


async def test_log_probs_have_to_be_finite(door: Door, config: OrchestratorConfig) -> None:
    async def solve(task: Task) -> None:
        sampled = Segment(ids(10, 11), np.asarray([-1, np.nan], np.float32), ((3, 0, 2),))
        door.held.record(ME.name, task.api_key, "chat-1", ids(7), sampled, b"", "c", "stop")

    with pytest.raises(InvalidReply, match=r"prompt row 2: logprobs\[1\] is nan; must be finite"):
        await converse(door, config, solve)


@pytest.mark.parametrize("told", [[], [{}, {}], None])
async def test_an_answer_that_tells_of_none_or_of_too_many_is_refused(
    door: Door, config: OrchestratorConfig, told: Any
) -> None:
    door.held.trajectories = lambda *asked: told  # type: ignore[method-assign]
    with pytest.raises(InvalidReply, match="/rl/trajectory: should tell of 1 to 1 sessions"):
        await converse(door, config, lambda task: door.say(task, ids(7), 10))


async def test_a_response_that_ended_in_no_known_way_is_refused(door: Door, config: OrchestratorConfig) -> None:
    with pytest.raises(InvalidReply, match=r"/rl/trajectory: .*'tired' is not a valid FinishReason"):
        await converse(door, config, lambda task: door.say(task, ids(7), 10, finish_reason="tired"))


async def test_lost_tokens_are_sampled_again(door: Door, config: OrchestratorConfig) -> None:
    door.lost = 1

    async def solve(task: Task) -> None:
        door.say(task, ids(7), 10)

    had, repeats = await converse(door, config, solve)
    assert (had.segments[1].ids.tolist(), repeats) == ([10], 1)


async def test_a_response_that_was_cut_off_is_truncated(door: Door, config: OrchestratorConfig) -> None:
    async def solve(task: Task) -> None:
        door.say(task, ids(7), 10, finish_reason="length")

    assert (await converse(door, config, solve))[0].truncated

    async def goes_on(task: Task) -> None:
        await solve(task)
        door.say(task, ids(7, 10, 5), 11)

    assert not (await converse(door, config, goes_on))[0].truncated


async def test_a_first_request_without_room_is_named(door: Door, config: OrchestratorConfig) -> None:
    async def solve(task: Task) -> None:
        door.held.leave(ME.name, task.api_key, 0, full=True)
        raise ValueError("400: leaves no room for a response")

    with pytest.raises(ConfigError, match="a first request that leaves no room for a response"):
        await converse(door, config, solve)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_conversation_without_room_is_over(door: Door, config: OrchestratorConfig, fails: bool) -> None:
    """Clients of OpenAI's protocol raise where a prompt is too long, and agents seldom expect that."""

    async def solve(task: Task) -> None:
        door.say(task, ids(7), 10)
        door.held.leave(ME.name, task.api_key, 1, full=True)
        if fails:
            raise ValueError("400: leaves no room for a response")

    had, repeats = await converse(door, config, solve)
    assert (had.truncated, repeats, had.result) == (True, 0, None)


async def test_the_session_of_an_agent_that_was_late_takes_no_more_requests(
    door: Door, config: OrchestratorConfig
) -> None:
    """A plain function goes on in its thread."""
    end = threading.Event()
    try:
        short = with_agent(config, conversation_s=0.2, attempts=1)
        async with open_agents(door, short, lambda task: end.wait(60)) as agents:
            with pytest.raises(ConfigError, match=r"took longer than 0\.2 s"):
                await agents.converse(REQUEST, **BOUNDS)
            async with asyncio.timeout(10):
                while door.held.counts()["sessions"]:
                    await asyncio.sleep(0.01)
    finally:
        end.set()


async def test_a_removal_that_is_not_answered_holds_nothing_up(door: Door, config: OrchestratorConfig) -> None:
    async def solve(task: Task) -> None:
        raise ValueError("it broke")

    tell = door.held.trajectories

    def told(*asked: Any) -> Any:
        door.answers.clear()
        return tell(*asked)

    async with open_agents(door, with_agent(config, attempts=1), solve) as agents:
        door.held.trajectories = told  # type: ignore[assignment]
        try:
            async with asyncio.timeout(10):
                with pytest.raises(ConfigError, match="it broke"):
                    await agents.converse(REQUEST, **BOUNDS)
                while door.requests < 3:  # that which starts it, that for its tokens, and its removal
                    await asyncio.sleep(0.01)
            assert door.held.counts()["sessions"] == 1
        finally:
            door.held.trajectories = tell  # type: ignore[method-assign]
            door.answers = asyncio.Event()  # the removal itself is never answered
            door.answers.set()
    assert door.held.counts()["sessions"] == 0


async def test_a_removal_that_was_refused_is_sent_again(door: Door, config: OrchestratorConfig) -> None:
    hasty = config.model_copy(update={"timeouts": config.timeouts.model_copy(update={"generate_s": 0.3})})
    async with client(door, hasty) as sessions:
        first, second = [await sessions.start({}, task_id="") for _ in range(2)]
        sessions.remove(first)
        door.busy = True
        with pytest.raises(Unavailable, match="/rl/trajectory: 503"):
            await sessions.trajectory(second)
        door.busy = False
        assert (await sessions.trajectory(second))["session_id"] == second.session_id
        assert door.held.counts()["sessions"] == 1


async def test_a_run_that_ends_removes_its_sessions(door: Door, config: OrchestratorConfig) -> None:
    begun = asyncio.Event()

    async def solve(task: Task) -> None:
        begun.set()
        await asyncio.Event().wait()

    under_way = asyncio.create_task(converse(door, config, solve))
    await begun.wait()
    under_way.cancel()
    with pytest.raises(asyncio.CancelledError):
        await under_way
    assert door.held.counts()["sessions"] == 0


async def test_a_service_that_is_gone_is_waited_for_and_then_named(config: OrchestratorConfig) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503, text="no replica could answer")

    hasty = config.model_copy(update={"timeouts": config.timeouts.model_copy(update={"generate_s": 0.3})})
    with pytest.raises(Unavailable, match=r"/rl/start_session: 503: no replica could answer"):
        await converse(refuse, hasty, lambda task: None)  # type: ignore[arg-type]
