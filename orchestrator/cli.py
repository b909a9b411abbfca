"""The `quartet` command."""

import asyncio
import errno
import itertools
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeGuard

from orchestrator.incomplete import OURS, reason

try:
    import typer
    from rich.console import Console
    from rich.markup import escape

    from orchestrator.monitoring.terminal import printable
    from orchestrator.supervised.registry import TRAININGS
    from quartet import tasks
    from quartet.config.base import IDLE_THREADS_SLEEP, ConfigError
    from quartet.threads import ending_quietly
    from quartet.wire.errors import NotFound, ServiceError, Unavailable, leaves
except ModuleNotFoundError as missing:  # the light install has no command line
    sys.exit(f"error: {reason(missing)}")

_DISK_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
}
"""Errors of files and folders that a user named or may have changed."""
_INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended."""

app = typer.Typer(
    help="RLHF-PPO for language models as four services and one orchestrator.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_errors = Console(stderr=True, highlight=False, soft_wrap=True)

ConfigFile = Annotated[Path, typer.Argument(help="The YAML file, of facts or whole, such as deploy/ppo.yaml.")]
Overwrite = Annotated[bool, typer.Option(help="Replace an earlier run of the same name.")]
Resume = Annotated[bool, typer.Option(help="Continue an earlier run of the same name from its last checkpoint.")]


def _say(text: str) -> None:
    _errors.print(printable(text), markup=False)


@contextmanager
def _interruptible(told: Callable[[], str]) -> Iterator[None]:
    """Context that Ctrl-C ends with what the user is then told."""
    try:
        yield
    # Python 3.11 ends with the second where a failure was mended in the very moment of another (its
    # TaskGroup then still counts as cancelled): a run that goes on after losses does that.
    except (KeyboardInterrupt, asyncio.CancelledError):
        _say(told())
        raise typer.Exit(_INTERRUPTED) from None


@app.command("up")
def start(
    config: ConfigFile,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for the services, in seconds.")] = 600,
) -> None:
    """Start a local Ray head unless one runs, deploy the services and wait until every model answers."""
    from orchestrator.commands.up import up

    goes_on = (
        f"what was started goes on: `quartet up {shlex.quote(str(config))}` waits for it, `quartet down` stops it"
    )
    with _interruptible(lambda: f"interrupted; {goes_on}"):
        up(config, timeout_s, _say)


@app.command()
def down() -> None:
    """Stop exactly what `quartet up` started in this folder."""
    from orchestrator.deployment import cluster

    started = cluster.last()
    if started is None:
        _say("`quartet up` has started nothing in this folder that still runs")
        return
    ran = started.alive
    cluster.stop(started)
    _say(
        f"stopped the Ray head at {started.address} and everything on it"
        if ran
        else f"the Ray head at {started.address} had ended before; what it left is removed, but for its logs"
    )


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="Folder of the keys; making keys in it again replaces them.")],
    client: Annotated[list[str], typer.Option(help="NAME=ROLE: trainer, sampler, judge-client or prober.")] = [],  # noqa: B006
    host: Annotated[list[str], typer.Option(help="Name or address under which callers reach the server.")] = [],  # noqa: B006
    tokens: Annotated[bool, typer.Option(help="Bearer tokens instead of client certificates.")] = False,
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days for which the certificates are valid.")] = 365,
    withdraw: Annotated[bool, typer.Option(help="Refuse at once what these clients had before.")] = False,
) -> None:
    """Make what a gRPC port needs that is open to a network: certificates, tokens and a policy."""
    from orchestrator.commands.keys import make_keys

    for line in make_keys(folder, client, host, tokens=tokens, days=days, withdraw=withdraw):
        _say(line)


@app.command("init")
def begin(
    file: Annotated[Path, typer.Argument(help="The YAML file to write, such as mine.yaml.")],
    model: Annotated[str, typer.Option(help="The model to train: a folder, or ORG/NAME@REVISION of a hub.")],
    reward: Annotated[
        str, typer.Option(help="A reward model, a function as package.module:name, or a reward service as HOST:PORT.")
    ],
    prompts: Annotated[str, typer.Option(help="A file, a folder of splits, or ORG/NAME@REVISION of a hub.")],
    input_key: Annotated[str | None, typer.Option(help="Column of the prompts, if it has no usual name.")] = None,
    label_key: Annotated[str | None, typer.Option(help="Column that a reward function gets as label.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longest response, in tokens.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the file if it exists.")] = False,
) -> None:
    """Write a commented YAML file for a policy, a reward and prompts of your own."""
    from orchestrator.commands.init.machine import Machine
    from orchestrator.commands.init.write import Wanted, init

    wanted = Wanted(model, reward, prompts, input_key, label_key, max_new_tokens)
    for note in init(file, wanted, Machine.here(), overwrite=overwrite):
        _say(note)
    name = shlex.quote(str(file))
    _say(f"wrote {file}; next: quartet check {name} && quartet up {name} && quartet train {name}")


@app.command()
def check(config: ConfigFile) -> None:
    """Validate the YAML file, the prompts, models and functions that it names, without starting anything."""
    from orchestrator.deployment import cluster
    from orchestrator.deployment.file import load_file

    written = load_file(config, check_services=True)
    # Imported here because they load torch, which takes seconds that an error in the file need not wait for.
    from orchestrator.commands.checks.preflight import checked
    from orchestrator.commands.up import consequences

    with written.naming():
        deployment, notes = checked(written)
    for note in notes:
        _say(written.worded(note))
    head = cluster.running()
    for line in itertools.chain(*consequences(head, deployment)) if head else []:
        _say(f"after `quartet up` here: {written.worded(line)}")
    _say(f"{config}: fine")


@app.command()
def render(config: Annotated[Path, typer.Argument(help="The YAML file of facts, such as mine.yaml.")]) -> None:
    """Print the whole file that a file of facts stands for, for `serve deploy` or to read."""
    from orchestrator.deployment.facts.render import render as text_of

    print(text_of(config), end="")


@app.command()
def train(
    config: ConfigFile,
    overwrite: Overwrite = False,
    resume: Resume = False,
    accept_changed_services: Annotated[
        bool, typer.Option(help="Resume although services hold other models than at the checkpoint.")
    ] = False,
    take_over: Annotated[
        bool, typer.Option(help="Train even if another run is using the services, and end that one.")
    ] = False,
) -> None:
    """Train with PPO through the services that are up."""
    from orchestrator.commands.run_folder import check_beginning
    from orchestrator.deployment import cluster

    check_beginning(overwrite=overwrite, resume=resume)
    # Must come before Ray is imported, which then fixes its own address and its token.
    cluster.join()
    from orchestrator.deployment.file import Deployment

    deployment = Deployment.load(config)
    # Imported here for the same reason as in `check`.
    from orchestrator.commands import train as run
    from orchestrator.commands.beginning import how_to_resume
    from orchestrator.commands.run_folder import policy_folder
    from orchestrator.monitoring.progress import make_progress

    progress = make_progress(sys.stderr)
    with _interruptible(lambda: how_to_resume(deployment)):
        folder = tasks.run(
            run.train(
                deployment,
                progress,
                overwrite=overwrite,
                resume=resume,
                take_over=take_over,
                accept_changed_services=accept_changed_services,
            )
        )
    _say(f"metrics are in {folder}, the trained policy is in {policy_folder(deployment.orchestrator)}")


def _training(name: str) -> Callable[..., None]:
    """The command of a training on examples, by its row."""

    def command(
        config: Annotated[Path, typer.Argument(help=f"The YAML file, such as {name}.yaml.")],
        overwrite: Overwrite = False,
        resume: Resume = False,
    ) -> None:
        # Imported here for the same reason as in `check`.
        from orchestrator.commands.run_folder import check_beginning
        from orchestrator.commands.supervised import TrainingFile, fit
        from orchestrator.monitoring.progress import make_progress

        check_beginning(overwrite=overwrite, resume=resume)
        file = TrainingFile.load(name, config)
        continues = f"`quartet {name} {shlex.quote(str(config))} --resume` continues from the last checkpoint"
        with _interruptible(lambda: f"interrupted; {continues}"):
            folder = asyncio.run(fit(file, make_progress(sys.stderr), overwrite=overwrite, resume=resume))
        _say(f"metrics are in runs/{file.training.name}, the trained model is in {folder}")

    return command


for _name, _kind in TRAININGS.items():
    app.command(_name, help=_kind.about)(_training(_name))


_ONE_RUN, _ROWS = "A run's file", "Rows"
_of_rows = partial(typer.Option, rich_help_panel=_ROWS)
"""An option of `quartet evaluate` for rows."""


@app.command()
def score(
    file: Annotated[Path, typer.Argument(help="JSONL with prompt or messages, and response; - is standard input.")],
    hub: Annotated[str, typer.Option(help="HOST:PORT of the reward service that scores.")],
    scorer: Annotated[list[str], typer.Option(help="A scorer there; may be repeated. Left out: the only one.")] = [],  # noqa: B006
    output: Annotated[
        Path | None, typer.Option(help="Where to write the rows; one that exists is continued. Left out: printed.")
    ] = None,
    application: Annotated[str, typer.Option(help="Name of the reward service's application.")] = "reward",
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Deadline of a call of up to 64 rows.")] = 600,
    overwrite: Annotated[bool, typer.Option(help="Begin again, though the output exists.")] = False,
) -> None:
    """Write the rows of a JSONL file or of standard input with the scores of a reward service, in order."""
    from orchestrator.commands.score import score_file
    from orchestrator.evaluation.hub import Hub

    rows = None if str(file) == "-" else file
    with _interruptible(lambda: "interrupted" + (f"; the same command goes on in {output}" if output else "")):
        opened = partial(Hub.at, hub, application, scorer, timeout_s)
        asyncio.run(score_file(rows, output, opened, _say, overwrite=overwrite))


def _refuse_options(context: typer.Context, panel: str, why: str) -> None:
    """Raises ConfigError if an option of this panel of the help is given."""
    of_panel = {
        str(option.name): option.opts[0]
        for option in context.command.params
        if getattr(option, "rich_help_panel", None) == panel
    }
    sources = {name: context.get_parameter_source(name) for name in of_panel}
    given = [of_panel[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    if given:
        raise ConfigError(f"{', '.join(given)}: {why}; leave it out")


@app.command()
def evaluate(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A run's YAML file; or JSONL of prompts, with responses or without.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder of a model; with --endpoint its model's name. Of a run, left out: the deployed one."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Of a run: where to write the samples. Of rows: the evaluation's folder.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Split, such as train[:100]. Left out: the file's eval_split.", rich_help_panel=_ONE_RUN),
    ] = None,
    hub: Annotated[str | None, _of_rows(help="HOST:PORT of the reward service that scores.")] = None,
    scorer: Annotated[list[str], _of_rows(help="A scorer there; may be repeated. Left out: the only one.")] = [],  # noqa: B006
    endpoint: Annotated[
        str | None, _of_rows(help="Address of OpenAI's protocol that answers, such as http://host/v1.")
    ] = None,
    key_variable: Annotated[str, _of_rows(help="Environment variable with the endpoint's key.")] = "OPENAI_API_KEY",
    chat: Annotated[bool, _of_rows(help="Send texts as a user's messages.")] = False,
    samples: Annotated[int, _of_rows(min=1, help="Responses to each prompt.")] = 1,
    temperature: Annotated[float | None, _of_rows(min=0, help="Left out: the endpoint's, or 1.")] = None,
    max_tokens: Annotated[int | None, _of_rows(min=1, help="Left out: the endpoint's, or 512.")] = None,
    seed: Annotated[int | None, _of_rows(help="Of the first sample; the others have the next.")] = None,
    setting: Annotated[
        list[str], _of_rows("--field", help="NAME=JSON, a field of each request or of a folder's engine.")
    ] = [],  # noqa: B006
    by: Annotated[list[str], _of_rows(help="Column by whose values figures are divided.")] = [],  # noqa: B006
    pass_at: Annotated[list[int], _of_rows(min=1, help="k of pass@k; may be repeated.")] = [],  # noqa: B006
    pass_score: Annotated[float, _of_rows(help="Score from which on a response passes.")] = 1,
    against: Annotated[Path | None, _of_rows(help="Folder of another evaluation to compare with.")] = None,
    at_once: Annotated[int, _of_rows(min=1, help="Responses asked for at a time.")] = 16,
    timeout_s: Annotated[float, _of_rows(min=0.001, help="Deadline of a response, repeats included.")] = 120,
    application: Annotated[str, _of_rows(help="Name of the reward service's application.")] = "reward",
    overwrite: Annotated[bool, _of_rows(help="Begin again, though the folder exists.")] = False,
) -> None:
    """Evaluate a run's model on its prompts; or any model or responses, by the scorers of a hub.

    A run's YAML file: generate on a split, have the run's reward service score, and print a table. JSONL: score its
    responses, or those of a model's folder or of an endpoint, by the scorers of the reward service at --hub.
    """
    if file.suffix in (".yaml", ".yml"):
        _refuse_options(context, _ROWS, f"for rows of JSONL, and {file} is a run's, which says it all")
        from orchestrator.deployment.file import Deployment

        deployment = Deployment.load(file)
        # Imported here for the same reason as in `check`.
        from orchestrator.commands.evaluate import CURRENT, evaluate_model

        evaluation = tasks.run(evaluate_model(deployment, model or CURRENT, split, output, note=_say))
        Console().print(evaluation.table())
        return
    if hub is None:
        raise ConfigError("--hub: required, HOST:PORT of the reward service that scores; or give a run's YAML file")
    _refuse_options(context, _ONE_RUN, f"for a run's YAML file, and of {file} all rows are taken")
    from orchestrator.commands import evaluate_rows as rows
    from orchestrator.evaluation.hub import Hub
    from orchestrator.report.evaluation import write_page

    folder = output or Path("evaluations") / file.stem
    wanted = rows.Wanted(
        file=file,
        output=folder,
        endpoint=endpoint,
        model=model,
        key=os.environ.get(key_variable, "").strip() or None,
        chat=chat,
        samples=samples,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        fields=rows.fields_of(setting),
        at_once=at_once,
        timeout_s=timeout_s,
        by=by,
        pass_at=pass_at,
        pass_score=pass_score,
        against=against,
        overwrite=overwrite,
    )
    opened = partial(Hub.at, hub, application, scorer, max(timeout_s, rows.SCORE_S))
    with _interruptible(lambda: f"interrupted; the same command goes on in {folder}"):
        results = asyncio.run(rows.evaluate_rows(wanted, opened, _say))
    Console().print(results.table())
    _say(f"wrote {write_page(folder)}")


@app.command()
def chat(
    config: ConfigFile,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer. Left out: what fits.")] = None,
    temperature: Annotated[float, typer.Option(help="0 for the likeliest tokens alone.")] = 1.0,
) -> None:
    """Talk with the model that the rollout service serves, also while it is trained: a line is a message."""
    from orchestrator.commands.chat import Chat
    from orchestrator.deployment.file import Deployment

    sampling = {"temperature": temperature} | ({} if max_tokens is None else {"max_completion_tokens": max_tokens})
    conversation = Chat.of(Deployment.load(config), **sampling)
    answers = Console(highlight=False, soft_wrap=True)
    for line in sys.stdin:
        if text := line.strip():
            version = conversation.say(text, lambda piece: answers.print(printable(piece), end="", markup=False))
            answers.print(f"  [dim](version {version})[/dim]")


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="A run's folder, such as runs/demo.")],
    samples: Annotated[int, typer.Option(help="Number of held-out responses that are shown, before and after.")] = 0,
) -> None:
    """Write report.html for a run and print its summary."""
    if samples < 0:
        raise ConfigError(f"--samples: should be 0 or more, got {samples}")
    from orchestrator.report.page import sample_pairs, summary_table, write_report

    page = write_report(run_dir)
    console = Console(highlight=False)
    console.print(summary_table(run_dir))
    for pair in sample_pairs(run_dir, samples) if samples else []:
        console.print(f"\n[bold]{escape(printable(pair.before.prompt))}[/bold]")
        for when, sample in (("before", pair.before), ("after", pair.after)):
            score = "  –  " if math.isnan(sample.score) else f"{sample.score:+.2f}"
            console.print(f"  {when:6}  {score}  {escape(printable(sample.response))}")
    _say(f"wrote {page}")


def main() -> None:
    """Runs the command; errors that a user can act on are shown as text and not as a traceback."""
    with ending_quietly():
        _carry_out()


def _carry_out() -> None:
    os.environ |= IDLE_THREADS_SLEEP | os.environ
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # in a log each step of theirs would be text
    sys.exit(_guarded(app))


def _guarded(command: Callable[[], Any]) -> int:
    try:
        command()
    except Exception as error:
        errors = leaves(error)
        if not all(_is_actionable(leaf) for leaf in errors):
            raise
        # Calls that fail together usually fail for one reason.
        texts = list(dict.fromkeys(_text(leaf) for leaf in errors))
        for text in texts:
            _errors.print(f"[red]error:[/red] {escape(printable(text))}")
        absent = any(isinstance(leaf, Unavailable | NotFound) for leaf in errors)
        if absent and not any("`quartet up" in text or "`serve deploy" in text for text in texts):
            from orchestrator.clients import advice

            _errors.print(f"are the services up? {advice('FILE')}")
        return 1
    return 0


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return reason(error) if _is_of_install(error) else str(error)


def _is_of_install(error: BaseException) -> TypeGuard[ModuleNotFoundError]:
    """True if a package of the user's own hides one of Quartet's, or if the command needs the full install and this
    is another one."""
    if not isinstance(error, ModuleNotFoundError):
        return False
    return (error.name or "").partition(".")[0] in OURS or find_spec("ray") is None


def _is_actionable(error: BaseException) -> bool:
    if isinstance(error, ConfigError | ServiceError) or _is_of_install(error):
        return True
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return True
    # Imported here because they load Ray and torch, which takes seconds that an error need not wait for.
    from orchestrator.deployment.cluster import ClusterError
    from orchestrator.deployment.listeners import PortError
    from orchestrator.experience.stream import DiscardedError
    from orchestrator.loop.mismatch import MismatchError
    from quartet.ranks.group import RanksLost

    return isinstance(error, ClusterError | DiscardedError | MismatchError | PortError | RanksLost)


if __name__ == "__main__":
    main()
