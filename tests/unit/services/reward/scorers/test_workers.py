"""Worker processes of scorers: what they cost when they hang, end, or need too much memory."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from quartet.config.base import ConfigError
from quartet.serving.batcher import SpoiltError
from quartet.wire.outcomes import Outcome, Unscored
from quartet.wire.pairs import Pair
from services.reward.kinds import FunctionScorerConfig
from services.reward.scorers import function as function_module
from services.reward.scorers import workers
from services.reward.scorers.function import FunctionScorer
from tests.scorers import WHOLE
from tests.unit.scorer_calls import batcher, called, row
from tests.unit.waiting import until


def scorer(name: str, **options: Any) -> FunctionScorer:
    settings = {"pair_timeout_s": 2.0, "workers": 3} | options
    return FunctionScorer(FunctionScorerConfig(kind="function", function=f"tests.scorers:{name}", **settings))


def processes() -> list[psutil.Process]:
    """The worker processes of this one, and those of which they are forks."""
    found = []
    for each in psutil.Process().children(recursive=True):
        try:
            if any(part.endswith("scorers/program.py") for part in each.cmdline()):
                found.append(each)
        except psutil.NoSuchProcess:
            pass
    return found


FAULTS = {
    "exits": "ended with exit code 3",
    "crashes": "was ended by SIGSEGV",
    "killed": "was ended by SIGKILL, as where the machine runs out of memory",
    "closes": "ended with exit code 1",
    "scribbles": "",
    "gulps": "needs more memory than memory_gib, 1, allows",
    "leaves": r"raised SystemExit in line \d+ of scorers\.py; see the reward service's log",
    "raises": r"raised ValueError in line \d+ of scorers\.py; see the reward service's log",
}


@pytest.mark.parametrize("function", ["faulty", "faulty_at_once"])
async def test_a_pair_that_ends_its_process_costs_no_other_its_score(function: str) -> None:
    passes = batcher(scorer(function, memory_gib=1.0))
    labels = [label for fault in FAULTS for label in ("", fault, "")]
    call = await called(passes, *labels)
    assert call.told == ["FAILED" if label else 1.0 for label in labels]
    for at, fault in enumerate(labels):
        if fault:
            assert re.match(f"tests.scorers:{function}:? .*{FAULTS[fault]}", call.reason(at))
            assert not re.search("1234|/", call.reason(at))


async def test_a_pair_that_hangs_costs_later_calls_no_time() -> None:
    passes = batcher(scorer("faulty", pair_timeout_s=600.0))
    hung = asyncio.create_task(called(passes, "", "hangs"))
    await until(lambda: passes._running)
    others = await asyncio.gather(*(called(passes, "", "declines") for _ in range(20)))
    assert [each.told for each in others] == [[1.0, "NOT_APPLICABLE"]] * 20
    assert not hung.done()
    hung.cancel()
    await asyncio.wait({hung})


async def test_pairs_that_hang_cost_no_other_its_score() -> None:
    made = scorer("faulty")
    passes = batcher(made)
    call = await called(passes, "", "hangs", "", "spins", "")
    assert call.told == [1.0, "TIMEOUT", 1.0, "TIMEOUT", 1.0]
    assert call.reason(1) == "tests.scorers:faulty took longer for a pair than pair_timeout_s, 2 s"
    await passes.check_health(made.check)


@pytest.mark.parametrize("function", ["faulty", "waits"])
async def test_a_process_that_leaks_is_replaced_and_all_pairs_are_scored(function: str) -> None:
    call = await called(batcher(scorer(function, memory_gib=0.25, pair_timeout_s=30.0)), *["leaks"] * 12)
    assert call.told == [1.0] * 12


async def test_the_callers_own_time_counts_too() -> None:
    made = scorer("faulty", pair_timeout_s=100.0)
    late = row(Pair("w1", "w2", "hangs", timeout_s=0.5))
    with pytest.raises(
        SpoiltError, match=r"took longer for a pair than the caller's pair_timeout_s, 0\.5 s"
    ) as caught:
        await made.score([row(Pair("w1", "w2")), late])
    assert (caught.value.result.outcome, caught.value.suspect) == (Outcome.TIMEOUT, 1)


@pytest.mark.parametrize("function", ["waits", "waiting"])
async def test_a_coroutine_function_has_all_pairs_at_once_each_with_its_time(function: str) -> None:
    made = scorer(function)
    results = await made.score([row(Pair("w1", "w2", label)) for label in ["5", "5", "hangs", "raises", "5"]])
    told = [each.outcome.name if isinstance(each, Unscored) else each for each in results]
    assert told == [1.0, 1.0, "TIMEOUT", "FAILED", 1.0]
    assert "took longer for a pair than pair_timeout_s, 2 s" in str(results[2])
    assert f"{function} raised ValueError in line" in str(results[3])
    assert "1234" not in str(results[3])


async def test_a_few_errors_of_a_call_are_logged_with_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may have a thousand pairs, and the replies do not say the text."""
    logged = list[str]()
    monkeypatch.setattr(function_module.log, "error", lambda text, *given: logged.append(text % given))
    results = await scorer("waits").score([row(Pair("w1", "w2", "raises"))] * 6)
    assert [each.outcome for each in results if isinstance(each, Unscored)] == [Outcome.FAILED] * 6
    assert [text.startswith("tests.scorers:waits failed\nTraceback") for text in logged] == [True] * 4
    assert all("1234" in text for text in logged)


async def test_a_function_sees_what_it_asks_for_of_the_environment_and_no_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("WANDB_API_KEY", "RAY_AUTH_TOKEN", "JUDGE_KEY"):
        monkeypatch.setenv(name, "secret")
    made = scorer("secrets", environment=("JUDGE_KEY",))
    labels = ["PATH", "WANDB_API_KEY", "RAY_AUTH_TOKEN", "JUDGE_KEY"]
    results = await made.score([row(Pair("", "", label)) for label in labels])
    assert [float(each[0]) for each in results if isinstance(each, np.ndarray)] == [1, 0, 0, 1]


async def test_all_of_a_pair_arrives() -> None:
    [score] = await scorer("whole").score([row(WHOLE)])
    assert score == [1.0]


async def test_a_process_that_ended_between_two_calls_costs_none_its_score() -> None:
    made = scorer("process")
    [[first]] = await made.score([row(Pair("", ""))])  # type: ignore[misc]
    os.kill(int(first), signal.SIGKILL)
    [[second]] = await made.score([row(Pair("", ""))])  # type: ignore[misc]
    assert first != second


THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
"""Text of a module for which no worker is a fork of a process that has imported it."""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of a user's, whose function is `score`."""
    monkeypatch.setenv("QUARTET_FUNCTIONS", str(tmp_path))
    sys.modules.pop("comes_and_goes", None)
    return tmp_path / "comes_and_goes.py"


def of_module() -> FunctionScorer:
    return FunctionScorer(FunctionScorerConfig(kind="function", function="comes_and_goes:score"))


@pytest.mark.parametrize("thread", ["", THREAD], ids=["forked", "with a thread"])
async def test_a_function_that_no_longer_starts_fails_its_pairs_and_health(module: Path, thread: str) -> None:
    """The process of which it is a fork ends with it."""
    module.write_text(f"{thread}import os\n\n\ndef score(pairs):\n    os.kill(os.getppid(), 9)\n    os._exit(7)\n")
    made = of_module()
    made.check()
    tries = module.with_name("tries")
    module.write_text(f"with open({str(tries)!r}, 'a') as file:\n    file.write('.')\nraise ValueError('gone')\n")
    call = await called(batcher(made), "")
    assert call.told == ["FAILED"]
    call = await called(batcher(made), *[""] * 9)
    assert call.told == ["FAILED"] * 9
    assert "comes_and_goes:score could not be started; see the reward service's log" in call.reason(8)
    assert "ValueError" not in call.reason(8)
    assert len(tries.read_text()) <= 3
    with pytest.raises(RuntimeError, match="comes_and_goes:score: ValueError: gone"):
        made.check()


@pytest.mark.parametrize(
    ("more", "imports"), [("", 1), (THREAD, 8), (f"FILE = open({__file__!r})\n", 8)], ids=["", "thread", "open file"]
)
async def test_a_module_is_imported_once_where_a_fork_is_no_danger_to_it(
    module: Path, more: str, imports: int
) -> None:
    """Elsewhere in the first process, and in each of the workers, of which two end for each pair that ends them."""
    tries = module.with_name("tries")
    exits = "def score(pairs):\n    return [0.0 if pair.label != 'exits' else os._exit(3) for pair in pairs]\n"
    module.write_text(f"import os\nwith open({str(tries)!r}, 'a') as file:\n    file.write('.')\n{more}{exits}")
    passes = batcher(of_module())
    for _ in range(3):
        assert (await called(passes, "exits")).told == ["FAILED"]
    assert (await called(passes, "")).told == [0.0]
    assert len(tries.read_text()) == imports


@pytest.mark.parametrize("beside", [False, True], ids=["its own", "imported"])
@pytest.mark.parametrize("thread", ["", THREAD], ids=["forked", "with a thread"])
async def test_scores_are_of_the_code_by_which_the_scorer_is_identified(
    module: Path, thread: str, beside: bool
) -> None:
    """A file that is changed while the service runs: that of the function, or one that it imports."""
    gives = "    return [1.0 if pair.label != 'exits' else os._exit(3) for pair in pairs]\n"
    text = f"{thread}import os\n\n\ndef score(pairs):\n{gives}"
    if beside:
        helper = module.with_name(f"{module.stem}_helper.py")
        module.write_text(
            f"from {helper.stem} import score as scored\n\n\ndef score(pairs):\n    return scored(pairs)\n"
        )
        module = helper
    module.write_text(text)
    passes = batcher(made := of_module())
    assert (await called(passes, "")).told == [1.0]
    module.write_text(text.replace("1.0", "2.0"))
    assert (await called(passes, "exits")).told == ["FAILED"]
    call = await called(passes, "")
    if thread:
        assert call.told == ["FAILED"]
        with pytest.raises(RuntimeError, match="no longer what it was when the service started; start the service"):
            made.check()
        module.write_text(text)  # as it was: the service goes on
        assert (await called(passes, "")).told == [1.0]
        made.check()
    else:
        assert call.told == [1.0]


async def test_a_module_whose_import_does_not_end_is_told(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both when the service starts and where its file has become such a one, when the next worker imports it."""
    late = "importing its module takes longer than 300 s"
    module.write_text("import time\ntime.sleep(600)\n")
    with monkeypatch.context() as short:
        short.setattr(workers, "START_S", 0.5)
        with pytest.raises(ConfigError, match=f"^reward.args.scorer.function: {late}"):
            of_module()
    ends = "def score(pairs):\n    os._exit(3)\n"
    module.write_text(f"{THREAD}import os\n\n\n{ends}")
    made = of_module()
    module.write_text(f"{THREAD}import time\ntime.sleep(600)\n")
    monkeypatch.setattr(workers, "START_S", 0.5)
    assert (await called(batcher(made), "")).told == ["FAILED"]
    with pytest.raises(RuntimeError, match=f"^comes_and_goes:score: {late}"):
        made.check()


async def test_nothing_is_left_of_a_scorer_that_is_gone() -> None:
    before = {each.pid for each in processes()}
    made = scorer("process")
    await asyncio.gather(*(made.score([row(Pair("", ""))]) for _ in range(2)))
    await made._workers.call([Pair("", "")], [60.0], fresh=True)  # by one in the place of another
    assert len(made._workers._resting) == 2
    await until(lambda: len({each.pid for each in processes()} - before) == 3)
    own = [each for each in processes() if each.pid not in before]
    del made
    gc.collect()
    _, alive = psutil.wait_procs(own, timeout=10)
    assert not alive


@pytest.mark.parametrize("end", ["exits", "killed", ""])
async def test_nothing_is_left_of_what_a_function_starts(tmp_path: Path, end: str) -> None:
    """Neither in a session of its own nor without a parent; where its worker ends, or else its scorer."""
    made = scorer("starting")
    await made.score([row(Pair("", "", str(tmp_path / "pids")))])
    own = [psutil.Process(int(line)) for line in (tmp_path / "pids").read_text().split()]
    assert len(own) == 2
    assert len({os.getsid(each.pid) for each in own}) == 2
    if end:
        assert (await called(batcher(made), end)).told == ["FAILED"]
    else:
        del made
        gc.collect()
    _, alive = psutil.wait_procs(own, timeout=10)
    for each in alive:
        each.kill()
    assert not alive


def packed(*parts: tuple[int, int, float]) -> dict[str, bytes]:
    rows, places, rewards = zip(*parts, strict=True)
    return {
        "part_rows": np.asarray(rows, np.int64).tobytes(),
        "part_places": np.asarray(places, np.int64).tobytes(),
        "part_rewards": np.asarray(rewards, np.float64).tobytes(),
    }


@pytest.mark.parametrize(
    "parts",
    [
        packed((1, 1, 1.0)),
        packed((-1, 1, 1.0)),
        packed((0, 0, 1.0)),
        packed((0, 1, 1.0)) | {"part_places": b""},
        packed((0, 1, 1.0)) | {"part_rewards": [1.0]},
        packed((0, 1, 1.0)) | {"part_rows": b"1"},
        {},
    ],
)
async def test_parts_of_no_pair_are_no_answer(parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may send them that the function has changed."""

    async def call(*_: Any, **__: Any) -> dict[str, Any]:
        return {"scores": np.ones(1).tobytes(), "unscored": [], **parts}

    made = scorer("odd_words", process=True)
    monkeypatch.setattr(made._workers, "call", call)
    with pytest.raises(SpoiltError, match=r"tests.scorers:odd_words: its process sent no answer$"):
        await made.score([row(Pair("", "w1"))])


PARENT = """
import asyncio, os, sys
from services.reward.kinds import FunctionScorerConfig
from services.reward.scorers import function as function_module
from services.reward.scorers import workers
from services.reward.scorers.function import FunctionScorer
from services.reward.scorers.scorer import EncodedPair
from quartet.wire.pairs import Pair

async def main():
    config = FunctionScorerConfig(kind="function", function="tests.scorers:faulty", pair_timeout_s=1000.0)
    scorer = FunctionScorer(config)
    print("started", flush=True)
    await scorer.score([EncodedPair(None, None, Pair("", "", "spins"))])

asyncio.run(main())
"""


def test_processes_end_with_the_replica_that_is_killed() -> None:
    """Even one that computes without end, and never reads of it."""
    root = Path(__file__).parents[5]
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=root) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == b"started\n"
        children: list[psutil.Process] = []
        while len(children) < 2 or children[1].cpu_times().user < 0.5:
            time.sleep(0.05)
            children = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_a_worker_imports_neither_torch_nor_pydantic() -> None:
    """A worker that replaces another costs little."""
    code = "import services.reward.scorers.program, services.reward.scorers.frames, sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert not loaded & {"torch", "numpy", "pydantic", "ray", "google.protobuf", "asyncio"}
