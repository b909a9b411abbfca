"""The `quartet` command."""

import asyncio
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from services.common.config import ConfigError
from services.common.errors import NotFound, ServiceError, Unavailable, leaves

_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}

app = typer.Typer(
    help="RLHF-PPO for language models as four services and one orchestrator.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_errors = Console(stderr=True, highlight=False, soft_wrap=True)

ConfigFile = Annotated[Path, typer.Argument(help="The YAML file, such as deploy/ppo.yaml.")]


def _say(text: str) -> None:
    _errors.print(text, markup=False)


@app.command()
def up(
    config: ConfigFile,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for the services, in seconds.")] = 600,
) -> None:
    """Start a local Ray head unless one runs, deploy the services and wait until every model answers."""
    from orchestrator import cluster
    from orchestrator.deployment import Deployment

    deployment = Deployment.load(config, check_services=True)
    if cluster.running() is None:
        if os.environ.get("RAY_ADDRESS"):
            raise ConfigError(
                f"RAY_ADDRESS is set: that cluster takes the file by `serve deploy {config}`; "
                "unset it to have a local Ray head started"
            )
        cluster.check_ports(deployment.ports)
    ray = cluster.start(_say)
    cluster.deploy(ray, config)
    cluster.await_running(ray, deployment.applications, _say, timeout_s)
    asyncio.run(_ask_all(deployment.orchestrator.target, timeout_s))
    _say(f"all running: {', '.join(deployment.applications)}; gRPC at {deployment.orchestrator.target}")


async def _ask_all(target: str, timeout_s: float) -> None:
    from orchestrator.services import Services

    services = Services.connect(target)
    try:
        await services.infos(timeout_s)
    finally:
        await services.close()


@app.command()
def down() -> None:
    """Stop exactly what `quartet up` started in this folder."""
    from orchestrator import cluster

    running = cluster.running()
    if running is None:
        _say("nothing runs that `quartet up` started in this folder")
        return
    cluster.stop(running)
    _say(f"stopped the Ray head at {running.address} and everything on it")


@app.command()
def check(config: ConfigFile) -> None:
    """Validate the YAML file, the prompts, models and functions that it names, without starting anything."""
    from orchestrator.deployment import Deployment

    deployment = Deployment.load(config, check_services=True)
    # Not before: this brings torch, seconds that a wrong file need not cost.
    from orchestrator.preflight import preflight

    for note in preflight(deployment).notes:
        _say(note)
    _say(f"{config}: fine")


@app.command()
def train(
    config: ConfigFile,
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier run of the same name.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on with it, from its last checkpoint.")] = False,
) -> None:
    """Train with PPO through the services that are up."""
    if overwrite and resume:
        raise ConfigError("--overwrite begins anew and --resume goes on; give one of them")
    from orchestrator import run
    from orchestrator.deployment import Deployment
    from orchestrator.progress import make_progress

    deployment = Deployment.load(config)
    progress = make_progress(sys.stderr)
    folder = asyncio.run(run.train(deployment, progress, overwrite=overwrite, resume=resume))
    _say(f"metrics, samples and the trained policy are in {folder}")


@app.command()
def evaluate(
    config: Annotated[Path, typer.Option(help="The YAML file whose services are up.")],
    model: Annotated[str, typer.Option(help="Folder of a model, or `current`: the rollout service's.")] = "current",
    split: Annotated[str, typer.Option(help="Split of the data set, such as eval or train[:100].")] = "eval",
    output: Annotated[Path | None, typer.Option(help="Where to write the samples, as JSONL.")] = None,
) -> None:
    """Generate on a split, have the deployed reward service score, and print a table."""
    from orchestrator.deployment import Deployment
    from orchestrator.standalone import evaluate_model

    deployment = Deployment.load(config)
    table = asyncio.run(evaluate_model(deployment, model, split, output))
    Console().print(table)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="A run's folder, such as runs/demo.")],
    samples: Annotated[int, typer.Option(help="How many prompts to show the responses to.")] = 0,
) -> None:
    """Write report.html for a run and print its summary."""
    if samples < 0:
        raise ConfigError(f"--samples: should be 0 or more, got {samples}")
    from orchestrator.report import sample_pairs, summary_table, write_report

    page = write_report(run_dir)
    console = Console(highlight=False)
    console.print(summary_table(run_dir))
    for pair in sample_pairs(run_dir, samples) if samples else []:
        console.print(f"\n[bold]{escape(pair.before.prompt)}[/bold]")
        console.print(f"  before  {pair.before.score:+.2f}  {escape(pair.before.response)}")
        console.print(f"  after   {pair.after.score:+.2f}  {escape(pair.after.response)}")
    _say(f"wrote {page}")


def main() -> None:
    """Runs the command; errors that a user can act on are shown as text and not as a traceback."""
    # Judges and reward functions of the current folder are found, as they are in the services' processes.
    sys.path.append(str(Path.cwd()))
    sys.exit(_guarded(app))


def _guarded(command: Callable[[], Any]) -> int:
    try:
        command()
    except Exception as error:
        found = leaves(error)
        if not all(_is_actionable(leaf) for leaf in found):
            raise
        # Calls that fail together usually fail for one reason.
        texts = list(dict.fromkeys(str(leaf) for leaf in found))
        for text in texts:
            _errors.print(f"[red]error:[/red] {escape(text)}")
        absent = any(isinstance(leaf, Unavailable | NotFound) for leaf in found)
        if absent and not any("quartet up" in text for text in texts):
            _errors.print("are the services up? `quartet up FILE` starts them")
        return 1
    return 0


def _is_actionable(error: BaseException) -> bool:
    if isinstance(error, ConfigError | ServiceError):
        return True
    if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
        return True
    # Not before: these bring Ray and torch, seconds that a wrong configuration need not cost.
    from orchestrator.cluster import ClusterError
    from orchestrator.policy_actor import PolicyError

    return isinstance(error, ClusterError | PolicyError)


if __name__ == "__main__":
    main()
