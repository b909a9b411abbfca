"""The plan: the stages of a lease in order of value, and the figures that are expected of them."""

from dataclasses import dataclass, field

PEER = "{peer}"
"""Stands in a stage's arguments for the Python that has TRL in it."""


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure that is expected, by arithmetic."""

    what: str
    """Beginning of the row's name."""
    figure: str
    value: float
    most: bool
    """The figure may be at most the value; else it should be at least the value."""

    def reached(self, actual: float) -> bool:
        """True if a figure is as good as this one or better."""
        return actual <= self.value if self.most else actual >= self.value


@dataclass(frozen=True, slots=True)
class Stage:
    """A benchmark with its arguments, which runs in processes of its own."""

    name: str
    module: str
    gpu: tuple[str, ...]
    """Arguments on a GPU."""
    cpu: tuple[str, ...]
    """Arguments of the smallest size, on a CPU."""
    expected_s: float
    """Seconds that it should take on a GPU: it is not started where fewer are left."""
    limit_s: float
    """Seconds after which it is killed on a GPU."""
    needs: tuple[str, ...] = ()
    """Packages that it imports and that a bare image lacks."""
    gib: float = 0.0
    """Memory of the GPU that it needs: it is left out where the GPU has less."""
    goals: tuple[Goal, ...] = field(default=())


def at_least(what: str, **figures: float) -> tuple[Goal, ...]:
    """Goals of one row whose figures should be as large as these."""
    return tuple(Goal(what, name, value, most=False) for name, value in figures.items())


def at_most(what: str, **figures: float) -> tuple[Goal, ...]:
    """Goals of one row whose figures should be as small as these."""
    return tuple(Goal(what, name, value, most=True) for name, value in figures.items())


CPU_S = 600.0
"""Seconds after which a stage is killed on a CPU."""
LEARNER = ("pydantic", "deepspeed")
ENGINE = ("pydantic", "vllm")
SYSTEM = (*LEARNER, "vllm", "ray", "cryptography")
TINY = ("--sizes", "tiny", "--device", "cpu")
SMALL_STEP = (*TINY, "--batch", "8", "--prompt", "16", "--new", "16", "--updates", "2")
SMALL_PUSH = ("--backend", "ipc", "--device", "cpu", "--mib", "1", "--bucket-mib", "1")
SMALL_ENGINE = (*TINY, "--prompts", "8", "--prompt", "16", "--new", "16")
ONE = ("--replicas", "1")
CARD_GIB, MORE_GIB = 76.0, 90.0
"""Memory for a whole step of 1.5B, by the sums of its processes, and for one with two engines."""


def _push(backend: str, **figures: float) -> Stage:
    """A push of the size of 1.5B through memory that is shared."""
    return Stage(
        f"push {backend}",
        "benchmarks.push",
        ("--backend", backend, "--device", "cuda", "--mib", "3072", "--bucket-mib", "256", *ONE, "--rounds", "3"),
        (*SMALL_PUSH, *ONE, "--rounds", "1"),
        expected_s=60,
        limit_s=150,
        needs=("pydantic", "ray"),
        goals=at_most(f"{backend}, 1 replica", **figures),
    )


def _step(
    name: str,
    size: str,
    *options: str,
    expected_s: float,
    limit_s: float | None = None,
    gib: float = 0.0,
    goals: tuple[Goal, ...] = (),
) -> Stage:
    """A whole PPO step of one side."""
    theirs = "trl" in options
    return Stage(
        name,
        "benchmarks.gpu.step",
        ("--sizes", size, "--updates", "3", *options),
        (*SMALL_STEP, *options),
        expected_s=expected_s,
        limit_s=limit_s or min(2 * expected_s, 580),
        needs=("trl", "datasets") if theirs else SYSTEM,
        gib=gib,
        goals=goals,
    )


def _training(name: str, sides: str, small: str, goals: tuple[Goal, ...] = ()) -> Stage:
    """Sides of a training step of 1.5B."""
    return Stage(
        name,
        "benchmarks.gpu.training",
        ("--sizes", "1.5B", "--sides", sides),
        (*TINY, "--tokens", "512", "--length", "64", "--sides", small),
        expected_s=120,
        limit_s=240,
        needs=LEARNER,
        goals=goals,
    )


def _engine(size: str, settings: str, expected_s: float, *goals: Goal) -> Stage:
    """An engine by itself, and a push into it."""
    return Stage(
        f"engine {size}",
        "benchmarks.gpu.engine",
        ("--sizes", size, "--settings", settings),
        (*SMALL_ENGINE, "--settings", settings),
        expected_s=expected_s,
        limit_s=2 * expected_s,
        needs=ENGINE,
        goals=(*at_most(size, mismatch=5e-3), *goals),
    )


STAGES = (
    _step(
        "step 1.5B",
        "1.5B",
        *("--only", "quartet", "--ways", "lock-step;ahead"),
        expected_s=390,
        limit_s=445,  # TRL's step, which is worth more than the last of the ways, begins in the same command
        gib=CARD_GIB,
        goals=(*at_least("1.5B Quartet", samples_s=28), *at_most("1.5B Quartet", push_s=0.15)),
    ),
    _step("TRL's step 1.5B", "1.5B", "--only", "trl", "--peer", PEER, expected_s=120, gib=CARD_GIB),
    Stage(
        "kills",
        "benchmarks.gpu.kills",
        (),
        ("--device", "cpu", "--backend", "ipc", "--mib", "8"),
        expected_s=60,
        limit_s=120,
        needs=("pydantic", "ray"),
        goals=(
            *at_most("a member that is killed", push_s=3, attempts=2),
            *at_most("a member that is frozen", push_s=15, attempts=2),
            *at_least("a member", have_it=1),
            *at_least("afterwards", have_it=2),
        ),
    ),
    _engine(
        "1.5B",
        "graphs;graphs, worker apart",
        120,
        *at_most("1.5B graphs", **{"cuda-ipc_push_s": 0.15}),
        *at_least("1.5B graphs", tokens_s=35_000),
    ),
    _training(
        "training 1.5B",
        "learner, compiled;plain loop",
        "learner;plain loop",
        at_least("1.5B learner, compiled", mfu_percent=45),
    ),
    Stage(
        "service 1.5B",
        "benchmarks.gpu.service",
        ("--size", "1.5B"),
        ("--size", "tiny", "--device", "cpu", "--prompts", "4", "--prompt", "16", "--new", "16", "--rounds", "1"),
        expected_s=150,
        limit_s=300,
        needs=SYSTEM,
        goals=at_least("1.5B service", ratio=0.95),
    ),
    _step("step 0.5B", "0.5B", "--only", "quartet", expected_s=200),
    _step("TRL's step 0.5B", "0.5B", "--only", "trl", "--peer", PEER, expected_s=60),
    Stage(
        "kernels",
        "benchmarks.gpu.kernels",
        (),
        ("--device", "cpu", "--positions", "256", "--vocabulary", "512", "--tokens", "512"),
        expected_s=35,
        limit_s=90,
    ),
    Stage(
        "machine",
        "benchmarks.gpu.machine",
        (),
        ("--device", "cpu", "--mib", "8", "--side", "128"),
        expected_s=25,
        limit_s=60,
        goals=(
            *at_least("pinned, to the device", gib_s=45),
            *at_least("XXH3, one thread", gib_s=10),
            *at_least("matrix product, bfloat16", tflop_s=700),
            *at_least("a kernel after a CUDA error", sum=2),
        ),
    ),
    Stage(
        "pushes 1.5B",
        "benchmarks.gpu.pushes",
        ("--sizes", "1.5B", "--rounds", "3"),
        (*TINY, "--rounds", "1"),
        expected_s=150,
        limit_s=240,
        needs=ENGINE,
        goals=(*at_most("1.5B cuda-ipc", push_s=0.15), *at_most("1.5B ipc", push_s=0.3)),
    ),
    _step(
        "step 1.5B, two engines",
        "1.5B",
        *("--only", "quartet", "--ways", "two engines"),
        expected_s=300,
        gib=MORE_GIB,
        goals=at_least("1.5B Quartet", samples_s=28),
    ),
    _step("step 1.5B, colocated", "1.5B", "--only", "quartet", "--colocate", expected_s=300, gib=CARD_GIB),
    _training(
        "training 1.5B, others",
        "learner;learner, checkpointing;learner, colocate",
        "learner, checkpointing;learner, colocate",
        at_least("1.5B learner", mfu_percent=33),
    ),
    _push("cuda-ipc", push_s=0.15),
    _push("ipc", push_s=0.3),
    Stage(
        "group",
        "benchmarks.gpu.group",
        (),
        ("--device", "cpu", "--mib", "1"),
        expected_s=45,
        limit_s=110,
        goals=(
            *at_most("a member that never joins", noticed_s=6),
            *at_most("a member that is frozen", noticed_s=6, close_s=6),
            *at_most("a member that is killed", noticed_s=6, close_s=6),
        ),
    ),
    _engine("0.5B", "eager;graphs, adapters", 110),
    Stage(
        "pushes 7B",
        "benchmarks.gpu.pushes",
        ("--sizes", "7B", "--rounds", "3"),
        (*TINY, "--rounds", "1"),
        expected_s=200,
        limit_s=400,
        needs=ENGINE,
        goals=(*at_most("7B cuda-ipc", push_s=0.4), *at_most("7B ipc", push_s=1.2)),
    ),
)
"""All stages, in the order of what they would add to what is known (README.md)."""
