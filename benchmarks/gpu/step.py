"""A whole PPO step with everything on one GPU, beside TRL 1.12.0's PPOTrainer on the same models. Ten minutes.

    python -m benchmarks.gpu.step [--sizes 0.5B,1.5B] [--batch 256] [--prompt 128] [--new 256] [--updates 4]
                                  [--ways WAY;WAY] [--colocate] [--peer PYTHON] [--only quartet|trl] [--device cuda]

Quartet runs `deploy/ppo-1gpu.yaml` with these models and lengths: seconds of each stage, samples/s, most memory of
each process (where nvidia-smi shows processes) and of the GPU, and the share of the updates in which the GPU
computed, as a whole and while the loop waited for each thing. Then TRL trains on the same prompts, with the same
minibatches: bfloat16 weights and no fp32 masters, the fastest that it does, although Quartet keeps masters. It
generates and scores a whole batch at a time. As it keeps the logits of three batches, its batch is the largest that
fits by arithmetic, and a smaller one if that does not fit after all. The first update of each side is left out. PEER
is a Python with TRL in it; by default this one (`pip install --no-deps trl==1.12.0`, and its accelerate and
datasets). All responses have `--new` tokens.

Quartet goes in lock-step. Other ways are `ahead`, where the next batch is sampled while one trains
(`loop.max_staleness: 1`); `two engines`, where a second rollout replica joins, since a decode step of many
responses takes an engine's processor longer than the GPU; and `sampled log-probs`, without the policy's own pass
before the update (`algorithm.old_logprobs: rollout`): TRL has none either, as it keeps the log-probs of its
generation. The ways asked for take turns on the same services.
"""

import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
import yaml

from benchmarks.arguments import check_known
from benchmarks.ended import lines
from benchmarks.figures import keep_file
from benchmarks.gpu.models import LETTERS, make, shape
from benchmarks.gpu.results import Cell, Results
from benchmarks.gpu.watch import Watch, busy
from benchmarks.tails import tails
from benchmarks.vs_trl.sides import LONGEST_S, PEER, STAGES, Quartet
from orchestrator.tracing.activity import LOOP
from orchestrator.tracing.file import read_tail
from quartet.models.size import ModelSize

DEPLOY = Path(__file__).parents[2] / "deploy" / "ppo-1gpu.yaml"
MINIBATCHES = 4
RATE = 1e-7
LOCK_STEP = "lock-step"
SAMPLED = "sampled log-probs"
WAYS = (LOCK_STEP, "ahead", "two engines", SAMPLED)
SHARE = 0.9
"""Most of a GPU's memory that a sum of TRL's may take: it is one by arithmetic."""


def main(
    sizes: str = "0.5B,1.5B",
    batch: int = 256,
    prompt: Annotated[int, typer.Option(help="tokens of a prompt")] = 128,
    new: Annotated[int, typer.Option(help="tokens of a response")] = 256,
    updates: Annotated[int, typer.Option(min=2)] = 4,
    ways: Annotated[str, typer.Option(help="of Quartet, separated by semicolons")] = "lock-step",
    colocate: Annotated[bool, typer.Option(help="parts give memory to one another")] = False,
    peer: str = sys.executable,
    only: Annotated[str, typer.Option(help="one side: quartet or trl")] = "",
    device: str = "cuda",
    out: Path = Path("runs/gpu"),
) -> None:
    """Runs the benchmark and prints its results."""
    check_known(ways.split(";"), WAYS, "--ways")
    check_known([only] if only else [], ("quartet", "trl"), "--only")
    results = Results("step", out)
    for size in sizes.split(","):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            models(folder, size, batch, prompt, device)
            if only != "trl":
                raw = configured(folder, batch=batch, prompt=prompt, new=new, device=device, colocate=colocate)
                _in_turn(results, size, Quartet(folder, raw), raw, ways.split(";"), updates)
            if only != "quartet":
                tries = sizes_that_fit(size, batch, prompt + new, new, memory_gib())
                settings = peer_settings(folder, tries, new, updates, device)
                name = f"{size} TRL"
                results.attempt(name, partial(theirs, results, name, peer, settings))
    results.show()


def _in_turn(
    results: Results, size: str, quartet: Quartet, raw: dict[str, Any], ways: Sequence[str], updates: int
) -> None:
    """Keeps a row for each way, until one fails."""
    try:
        for way in ways:
            trace = (
                f"trace-{size}{'-colocated' * raw['orchestrator']['loop']['colocate']}-{way.replace(' ', '-')}.json"
            )
            name = f"{size} Quartet" + f", {way}" * (way != LOCK_STEP)
            results.attempt(name, partial(ours, quartet, set_way(raw, way), updates, trace))
            if not results.last_worked:
                break
    finally:
        quartet.down()


def set_way(raw: dict[str, Any], way: str) -> dict[str, Any]:
    """The file, changed so that it runs in this way."""
    raw["orchestrator"]["loop"]["max_staleness"] = int(way == "ahead")
    raw["orchestrator"]["algorithm"]["old_logprobs"] = "rollout" if way == SAMPLED else "learner"
    [rollout] = [application for application in raw["applications"] if application["name"] == "rollout"]
    replicas = 1 + (way == "two engines")
    rollout["deployments"][0]["autoscaling_config"] = {"min_replicas": replicas, "max_replicas": replicas}
    return raw


def models(folder: Path, size: str, batch: int, prompt: int, device: str) -> None:
    """Writes `policy`, `reward` and `prompts.jsonl`, whose prompts have `prompt` tokens each."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    make(folder / "policy", size, dtype)
    make(folder / "reward", size, dtype, reward=True)
    letters = np.random.default_rng(0).choice(
        list(LETTERS), (8 * batch, prompt)
    )  # more than are used: TRL steps early at their end
    lines = [json.dumps({"prompt": "".join(row)}) for row in letters.tolist()]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def configured(
    folder: Path, *, batch: int, prompt: int, new: int, device: str = "cuda", colocate: bool = False
) -> dict[str, Any]:
    """deploy/ppo-1gpu.yaml for these models and lengths; for a CPU without its GPUs, in float32."""
    raw: dict[str, Any] = yaml.safe_load(DEPLOY.read_text())
    run_, policy, reward = raw["orchestrator"], str(folder / "policy"), str(folder / "reward")
    parts = {application["name"]: application["args"] for application in raw["applications"]}
    parts["rollout"] |= {"model": policy, "max_length": prompt + new, "max_num_seqs": batch, "kv_cache_mib": 4096}
    parts["reward"] |= {"tokenizer": policy}
    parts["reward"]["scorer"] |= {"model": reward}
    parts["reference"] |= {"model": policy}
    parts["critic"] |= {"model": reward}
    run_["policy"] |= {"model": policy}
    for learner in (parts["critic"], run_["policy"]):
        learner |= {"optimizer": {"learning_rate": RATE}, "colocate": colocate}
    parts["rollout"]["colocate"] = run_["loop"]["colocate"] = colocate
    run_ |= {"name": "race", "batch_size": batch, "gpu_gib": None, "checkpoint": {"every": 0}}
    run_ |= {"evaluation": {"every": 0}, "log": {"tensorboard": False}}
    run_["data"] = {"path": str(folder / "prompts.jsonl"), "max_prompt_length": prompt}
    run_["sampling"] = {"max_new_tokens": new, "min_new_tokens": new}
    run_["algorithm"]["minibatch_size"] = batch // MINIBATCHES
    for application in raw["applications"]:
        if application["name"] == "rollout":
            application["deployments"][0]["ray_actor_options"]["num_gpus"] = 0.1  # so that two may be there
    if device == "cpu":
        _on_a_cpu(raw, parts)
    elif torch.cuda.is_available():
        run_["gpu_gib"] = memory_gib()
    return raw


def _on_a_cpu(raw: dict[str, Any], parts: dict[str, dict[str, Any]]) -> None:
    parts["rollout"] |= {"kv_cache_mib": 64}
    for part in (parts["rollout"], parts["reward"]["scorer"], parts["reference"], parts["critic"]):
        part["dtype"] = "float32"
    for part in (parts["critic"], raw["orchestrator"]["policy"]):
        part |= {"dtype": "float32", "zero_stage": 0, "colocate": False}
    for part in (parts["reward"]["scorer"], parts["reference"], parts["critic"], raw["orchestrator"]["policy"]):
        part["compile_layers"] = False  # four compilers on a CPU take minutes for a model that is gone in seconds
    raw["orchestrator"]["policy"] |= {"num_gpus": 0, "num_cpus": 0.2}
    raw["orchestrator"]["weights"]["backend"] = "ipc"
    for application in raw["applications"]:
        application["deployments"][0]["ray_actor_options"] = {"num_cpus": 0.2}


def ours(quartet: Quartet, raw: dict[str, Any], updates: int, trace: str) -> dict[str, Cell]:
    """Median seconds of each stage of Quartet's updates, samples/s, how busy the GPU was in them, and what it had to
    hold. Starts the services, or changes those that run. The run's trace is kept beside the figures under the name
    `trace`."""
    done: list[dict[str, float]] = []
    try:
        quartet.up()
        with Watch() as watch:
            done = quartet.updates(updates)
    finally:
        if not done:
            print(tails(quartet.folder), flush=True)  # the folder is about to go
    keep_file(quartet.trace, trace)
    waits = [span for span in read_tail(quartet.trace) if span.track == LOOP]
    compute = busy(watch.looks, done[0]["ended"], done[-1]["ended"], waits)
    stages: dict[str, Cell] = {f"{stage}_s": median(update[stage] for update in done[1:]) for stage in STAGES}
    step_s = median(update["step"] for update in done[1:])
    samples_s = raw["orchestrator"]["batch_size"] / step_s
    return {"samples_s": samples_s, "step_s": step_s} | stages | compute | watch.memory()


def theirs(results: Results, name: str, python: str, settings: dict[str, Any]) -> dict[str, Cell]:
    """Samples/s of TRL with its largest batch, how busy the GPU was, and what it had to hold. Keeps what is known
    before the last update in a row of its own, as the time may be over by then."""
    environment = dict(os.environ)
    if Path(python).absolute() != Path(sys.executable).absolute():
        environment.pop("PYTHONPATH", None)  # libraries of another environment
    done: list[dict[str, float]] = []
    with Watch() as watch:
        for line in lines([python, str(PEER), json.dumps(settings)], environment, LONGEST_S):
            if not line.startswith('{"seconds"'):
                continue
            update = json.loads(line)
            # A larger batch did not fit after all.
            done = [*(one for one in done if one["batch"] == update["batch"]), update]
            if 1 < len(done) < settings["updates"]:
                results.add(f"{name}, so far", **_rates(done, watch))
    return _rates(done, watch)


def _rates(done: Sequence[dict[str, float]], watch: Watch) -> dict[str, Cell]:
    """Figures of TRL's updates so far, without the first."""
    batch, step_s = int(done[0]["batch"]), median(update["seconds"] for update in done[1:])
    compute = busy(watch.looks, done[0]["ended"], done[-1]["ended"])
    return {"samples_s": batch / step_s, "step_s": step_s, "batch": batch} | compute | watch.memory()


def memory_gib() -> float:
    """Memory of the GPU; infinite without one."""
    return torch.cuda.mem_get_info()[1] / 2**30 if torch.cuda.is_available() else math.inf


def sizes_that_fit(size: str, batch: int, longest: int, new: int, gib: float) -> list[dict[str, int]]:
    """TRL's batches that fit into so much memory, the largest first, from `batch` to an eighth of it; for each the
    number of responses that fit into a training pass."""
    found = []
    for count in (batch, batch * 3 // 4, batch // 2, batch // 4, batch // 8):
        minibatch = count // MINIBATCHES
        micros = [micro for micro in range(minibatch, 0, -1) if minibatch % micro == 0]
        fitting = [micro for micro in micros if trl_gib(size, count, micro, longest, new) <= SHARE * gib]
        if fitting:
            found.append({"batch": count, "micro": fitting[0]})
    return found


def trl_gib(size: str, batch: int, micro: int, longest: int, new: int) -> float:
    """GiB that TRL 1.12.0's PPOTrainer holds at most, by arithmetic, with weights, gradients and moments in bfloat16.

    It keeps a batch's logits in float32 until the next batch has been sampled, which holds them twice: as generated,
    and padded. A training pass of `micro` sequences keeps its states for the backward pass of both models: 8 bytes a
    token for each number of an MLP, and 20 for each of the hidden states, which is what a plain loop took on an H200;
    and the logits four times, with their gradient.
    """
    model = ModelSize.of(shape(size))
    rest = 16 * model.parameters  # four models, and two moments for each of two
    logits = 4 * batch * new * model.vocabulary
    cache = 4 * batch * longest * model.layers * model.keys
    kept = 2 * model.layers * (8 * model.intermediate + 20 * model.hidden) + 8 * model.vocabulary
    training = rest + 4 * model.parameters + logits + micro * longest * kept
    return max(rest + 3 * logits + cache, training) / 2**30


def peer_settings(folder: Path, tries: list[dict[str, int]], new: int, updates: int, device: str) -> dict[str, Any]:
    """TRL's settings for the same step, with the first of these batches that fits."""
    return {
        "algorithm": "ppo",
        "folder": str(folder),
        "tries": tries,
        "minibatches": MINIBATCHES,
        "epochs": 1,
        "response": new,
        "equal": True,
        "rate": RATE,
        "updates": updates,
        "device": device,
        "weights": "bfloat16" if device == "cuda" else "float32",
        "threads": len(os.sched_getaffinity(0)),
    }


if __name__ == "__main__":
    typer.run(main)
