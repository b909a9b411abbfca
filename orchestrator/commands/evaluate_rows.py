"""`quartet evaluate FILE.jsonl`: evaluates responses, or a model that answers prompts, by the scorers of a hub."""

import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from orchestrator.evaluation.asking import Source, ask, is_done
from orchestrator.evaluation.endpoint import Endpoint
from orchestrator.evaluation.figures import (
    JOURNAL,
    ROWS,
    SUMMARY,
    UNANSWERED,
    Figure,
    Measured,
    as_text,
    figures,
    read_measured,
    read_other,
)
from orchestrator.evaluation.hub import Hub, Verdict, check_free
from orchestrator.evaluation.intervals import Interval
from orchestrator.evaluation.journal import Answer, Journal
from orchestrator.evaluation.rows import Row, RowFile, dumped
from orchestrator.monitoring.bar import Bar
from quartet.config.base import ConfigError
from quartet.folders import naming, opened
from quartet.threads import in_thread
from quartet.wire.errors import DeadlineExceeded, InvalidArgument
from quartet.wire.json_object import strict_json

if TYPE_CHECKING:  # of what a model's folder needs alone
    from orchestrator.commands.offline import OfflineRollout

SCORE_S = 600.0
"""Shortest deadline of a call of the hub, in seconds: a judge may take long for some tens of responses."""
START_S = 1800.0
"""Longest start of a folder's engine, in seconds."""
MOST_VALUES = 64
"""Most different values of a column by which figures are divided."""
PREPARED = 256
"""Prompts that are rendered and made tokens at a time, for a model's folder."""
_FILLED = ("sample", "ended", "policy_version", UNANSWERED)
"""Columns that tell of a model's answer, beside the response."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An evaluation as its command states it."""

    file: Path
    """The rows: prompts with responses, or prompts alone."""
    output: Path
    """The evaluation's folder."""
    endpoint: str | None = None
    """Address of OpenAI's protocol; None: the rows have responses, or `model` is a folder."""
    model: str | None = None
    """Name of the endpoint's model, or without an endpoint a folder; None: what the endpoint serves."""
    key: str | None = None
    """The endpoint's key."""
    chat: bool = False
    """Send texts as messages of a user."""
    samples: int = 1
    """Responses to each row."""
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request, or of the engine's configuration for a folder."""
    at_once: int = 16
    """Responses that are asked for at the same time."""
    timeout_s: float = 120.0
    """Longest time for a response, in seconds."""
    by: Sequence[str] = ()
    pass_at: Sequence[int] = ()
    pass_score: float = 1.0
    against: Path | None = None
    """Folder of another evaluation, to compare with."""
    overwrite: bool = False

    @property
    def generates(self) -> bool:
        """True if a model answers the rows."""
        return self.endpoint is not None or self.model is not None

    @property
    def sampling(self) -> dict[str, Any]:
        """Settings of a model that answers, by the names of their options."""
        return {
            "--chat": self.chat,
            "--samples": self.samples,
            "--temperature": self.temperature,
            "--max-tokens": self.max_tokens,
            "--seed": self.seed,
            "--field": dict(self.fields),
        }

    def settings(self, file: RowFile, hub: Hub, model_hash: str | None) -> dict[str, Any]:
        """All that decides on answers and scores, by the name of its option."""
        model = {"--endpoint": self.endpoint, "--model": self.model, "files of --model": model_hash}
        return {
            "FILE": {"name": self.file.name, "sha256": file.hash, "rows": len(file)},
            **(model | self.sampling if self.generates else {}),
            **{f"--scorer {name}": scorer.written() for name, scorer in hub.scorers.items()},
        }


@dataclass(frozen=True, slots=True)
class Results:
    """A finished evaluation."""

    settings: Mapping[str, Any]
    figures: Sequence[Figure]
    samples: int
    """Number of samples."""
    unanswered: int
    """Number of samples without a response."""
    cut_off: int
    """Number of samples that a limit cut off, as far as that is known."""
    versions: Sequence[int]
    """Versions of the weights that answered, where an endpoint says so."""
    folder: Path

    def written(self) -> dict[str, Any]:
        """The results as JSON."""
        return {
            "settings": self.settings,
            "samples": self.samples,
            UNANSWERED: self.unanswered,
            "cut_off": self.cut_off,
            "policy_versions": list(self.versions),
            "remarks": self.remarks(),
            "figures": [figure.written() for figure in self.figures],
        }

    def remarks(self) -> list[str]:
        """Sentences that a reader of the figures should know."""
        told = [f"{self.samples:,} samples"]
        told += [f"{self.unanswered:,} without a response"] if self.unanswered else []
        told += [f"{self.cut_off:,} cut off by the limit on length"] if self.cut_off else []
        if self.versions:
            first, last = self.versions[0], self.versions[-1]
            told.append(
                f"weights of version {first}" + ("" if first == last else f" to {last}: they changed meanwhile")
            )
        return told

    def table(self) -> Table:
        """The figures for rich to print: a row for each measure of each group."""
        drawn = Table(caption="; ".join(self.remarks()), title_justify="left")
        drawn.add_column("measure")
        ks = sorted({k for figure in self.figures for k in figure.passes})
        compared = any(figure.against for figure in self.figures)
        drawn.add_column("scorer", overflow="fold", min_width=12)
        drawn.add_column("samples of", overflow="fold")
        comparing = ("win rate", "sign test") if compared else ()
        for heading in ("mean", *(f"pass@{k}" for k in ks), *comparing, "scored"):
            drawn.add_column(heading, justify="right")
        for figure in self.figures:
            against = figure.against
            comparison = [shown(against.wins), f"p = {against.p:.3g}"] if against else ["–", "–"]
            drawn.add_row(
                figure.measure,
                f"{figure.scorer['name']}\n{figure.scorer['hash'][:12]}",
                figure.group.encode(errors="replace").decode() or "all",
                shown(figure.mean),
                *(shown(figure.passes.get(k)) for k in ks),
                *(comparison if compared else ()),
                coverage(figure),
            )
        return drawn


async def evaluate_rows(
    wanted: Wanted, connect: Callable[[], Awaitable[Hub]], note: Callable[[str], None] = lambda text: None
) -> Results:
    """Asks for what the journal lacks, and writes rows.jsonl and summary.json into the evaluation's folder.

    Raises:
        ConfigError: an option or a row is wrong, or a setting has changed since the folder's journal was begun.
        ServiceError, ExceptionGroup of these: the endpoint, the engine or the hub does not answer.
    """
    if not wanted.file.is_file():
        raise ConfigError(f"{wanted.file}: no such file")
    if not wanted.generates and wanted.samples != 1:
        raise ConfigError("--samples: the rows hold the responses, several to a prompt in rows of their own")
    left_out = Wanted(wanted.file, wanted.output).sampling
    if not wanted.generates and (given := [name for name, it in wanted.sampling.items() if it != left_out[name]]):
        raise ConfigError(
            f"{', '.join(given)}: for a model that answers; give --endpoint or --model too, or leave them out"
        )
    if wanted.generates and (most := max(wanted.pass_at, default=0)) > wanted.samples:
        raise ConfigError(f"--pass-at {most}: needs as many --samples or more, got {wanted.samples}")
    async with AsyncExitStack() as stack:
        hub = await stack.enter_async_context(await connect())
        file = stack.enter_context(
            await in_thread(partial(RowFile, wanted.file, _Checked(wanted, hub).check), "rows")
        )
        source, model_hash = await _source(wanted, file)
        settings = wanted.settings(file, hub, model_hash)
        others = None
        if wanted.against is not None:
            identities = {name: scorer.written() for name, scorer in hub.scorers.items()}
            others = await in_thread(partial(read_other, wanted.against / ROWS, identities), "the other evaluation")
        journal = stack.enter_context(Journal(wanted.output / JOURNAL, settings, overwrite=wanted.overwrite))
        keys = ((index, sample) for index in range(len(file)) for sample in range(wanted.samples))
        done = sum(is_done(journal, key) for key in keys)
        if isinstance(source, Folder) and done < len(file) * wanted.samples:
            await stack.enter_async_context(source.running())
        with Bar(sys.stderr, "evaluating", len(file) * wanted.samples, done) as bar:
            await ask(
                file, wanted.samples, source, hub, journal, at_once=wanted.at_once, advance=partial(bar.advance, 1)
            )
        results = await in_thread(partial(_results, wanted, file, hub, journal, settings, others), "figures")
    note(f"rows, figures and journal are in {wanted.output}")
    return results


class _Checked:
    """The rows of a file, checked one after the other."""

    def __init__(self, wanted: Wanted, hub: Hub) -> None:
        self._wanted, self._hub = wanted, hub
        self._values: dict[str, set[str]] = {column: set() for column in wanted.by}

    def check(self, row: Row) -> None:
        """Raises ConfigError unless the row has what the evaluation needs, and has room for what it adds."""
        wanted, where = self._wanted, f"{self._wanted.file}, line {row.line}"
        if row.response is None and not wanted.generates:
            raise ConfigError(f"{where}: response: required, unless --endpoint or --model answers")
        if row.response is not None and wanted.generates:
            raise ConfigError(
                f"{where}: response: is there already; leave out --endpoint and --model to score it, or rename the "
                "column"
            )
        for column in _FILLED if wanted.generates else ():
            if column in row.values:
                raise ConfigError(f"{where}: {column}: would be overwritten, as it is filled; rename it")
        for column, values in self._values.items():
            if column not in row.values:
                raise ConfigError(f"{where}: {column}: required by --by; there are {', '.join(row.values)}")
            values.add(as_text(row.values[column]))
            if len(values) > MOST_VALUES:
                raise ConfigError(
                    f"{where}: --by {column}: has more than {MOST_VALUES} different values, which are the most"
                )
        check_free(row, self._hub.scorers, str(wanted.file))


async def _source(wanted: Wanted, file: RowFile) -> tuple[Source | None, str | None]:
    """The source of responses, and the hash of a folder's model, which does not run yet."""
    if wanted.endpoint is not None:
        named = {"model": wanted.model, "temperature": wanted.temperature, "max_tokens": wanted.max_tokens}
        fields = {name: value for name, value in named.items() if value is not None} | dict(wanted.fields)
        return Endpoint(
            wanted.endpoint,
            fields,
            wanted.key,
            chat=wanted.chat,
            seed=wanted.seed,
            samples=wanted.samples,
            timeout_s=wanted.timeout_s,
        ), None
    if wanted.model is None:
        return None, None
    # Imported here because it loads torch.
    from orchestrator.commands.offline import OfflineRollout
    from quartet.wire.identity import model_hash

    config = engine_config(wanted.model, wanted.fields)
    digest = await in_thread(partial(model_hash, wanted.model), "the model's hash")
    return Folder(wanted, file, OfflineRollout(config, {})), digest


def engine_config(model: str, fields: Mapping[str, Any]) -> Any:
    """The engine's configuration for a model's folder on this machine. ConfigError if a field is wrong."""
    from quartet.models.device import default_device
    from services.rollout.config import RolloutConfig

    gpu = default_device().type == "cuda"
    here = {"dtype": "bfloat16"} if gpu else {"dtype": "float32", "kv_cache_mib": 1024}
    return RolloutConfig.parse({"model": model} | here | dict(fields), "--model, --field")


class Folder:
    """Responses of a model's folder, by an engine of its own, while it is `running`."""

    def __init__(self, wanted: Wanted, file: RowFile, offline: "OfflineRollout") -> None:
        from quartet.models.loading import load_tokenizer
        from services.rollout.sample import Sampling

        self._wanted, self._file, self._offline = wanted, file, offline
        self._tokenizer = load_tokenizer(str(wanted.model))
        temperature = 1.0 if wanted.temperature is None else wanted.temperature
        self._sampling = Sampling(wanted.max_tokens or 512, temperature)
        self._prompts: dict[int, Any] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context of the engine; begins when it answers, which takes it much longer at first."""
        self._prepare(range(1))
        first = replace(self._sampling, max_new_tokens=1)
        async with self._offline.running():
            with suppress(InvalidArgument):  # an answer too
                async for _ in self._offline.generate([self._prompts[0]], first, timeout_s=START_S):
                    pass
            yield

    async def respond(self, index: int, row: Row, sample: int) -> Answer:
        """A response to the row; or the reason why there is none, where the prompt is too long or the engine slow."""
        from services.rollout.sample import FinishReason

        if index not in self._prompts:
            self._prepare(range(index, min(index + PREPARED, len(self._file))))
        seed = (self._wanted.seed or 0) + index * self._wanted.samples + sample
        asked = self._offline.generate(
            [self._prompts[index]], self._sampling, seeds=[seed], timeout_s=self._wanted.timeout_s
        )
        try:
            [response] = [each async for samples in asked for each in samples]
        except InvalidArgument as error:
            return Answer(None, problem=str(error))
        except DeadlineExceeded as error:
            return Answer(None, problem=str(error), may_pass=True)
        text = self._tokenizer.decode(response.response_ids, skip_special_tokens=True)
        return Answer(text, response.finish_reason is FinishReason.STOP)

    def _prepare(self, indices: range) -> None:
        """Makes the prompts of these rows tokens. ConfigError if the chat template refuses one."""
        import numpy as np

        from orchestrator.data.rendering import render

        rows = {index: self._file[index] for index in indices if index not in self._prompts}
        # A chat template writes the special tokens itself.
        chats = {index: row for index, row in rows.items() if row.messages or self._wanted.chat}
        conversations = [
            [dict(message) for message in row.messages] or [{"role": "user", "content": row.prompt}]
            for row in chats.values()
        ]
        places = [f"{self._file.path}, line {row.line}" for row in chats.values()]
        texts = dict(zip(chats, render(conversations, self._tokenizer, places) if chats else [], strict=True))
        for index, row in rows.items():
            text = texts.get(index, row.prompt)
            ids = self._tokenizer(text, add_special_tokens=index not in texts)["input_ids"]
            if not len(ids):
                raise ConfigError(f"{self._file.path}, line {row.line}: prompt: has no tokens")
            self._prompts[index] = np.asarray(ids, np.int32)


def _results(
    wanted: Wanted,
    file: RowFile,
    hub: Hub,
    journal: Journal,
    settings: Mapping[str, Any],
    others: Sequence[Measured] | None,
) -> Results:
    """Writes rows.jsonl and summary.json, and computes the figures of what was written."""
    path, unanswered, cut_off = wanted.output / ROWS, 0, 0
    versions = set[int]()
    aside = path.with_name(f".{path.name}.writing")
    with opened(aside, "wb", path) as writing:
        for index in range(len(file)):
            row = file[index]
            for sample in range(wanted.samples):
                values, verdict = dict(row.values), journal.verdict((index, sample))
                if wanted.generates and (answer := journal.answer((index, sample))) is not None:
                    values |= {"sample": sample, "response": answer.response}
                    values |= {} if answer.ended is None else {"ended": answer.ended}
                    cut_off += answer.ended is False
                    if answer.policy_version is not None:
                        values["policy_version"] = answer.policy_version
                        versions.add(answer.policy_version)
                    if answer.response is None:
                        values[UNANSWERED], verdict = answer.problem, None
                        unanswered += 1
                nothing = Verdict({each: None for scorer in hub.scorers.values() for each in scorer.measures})
                line = dumped((verdict or nothing).on(values, hub.scorers))
                with naming(path):
                    writing.write(line)
    aside.replace(path)
    measured = [sample for sample, _ in read_measured(path, wanted.by)]
    scorers = {name: (scorer.written(), scorer.measures) for name, scorer in hub.scorers.items()}
    computed = figures(
        measured, scorers, by=wanted.by, pass_at=wanted.pass_at, passes=wanted.pass_score, against=others
    )
    about = {"--by": list(wanted.by), "--pass-at": list(wanted.pass_at), "--pass-score": wanted.pass_score}
    about |= {"--against": str(wanted.against) if wanted.against else None}
    told = dict(settings) | {name: value for name, value in about.items() if value}
    results = Results(
        told, computed, len(file) * wanted.samples, unanswered, cut_off, sorted(versions), wanted.output
    )
    text = json.dumps(results.written(), indent=1, ensure_ascii=False, allow_nan=False)
    # Half of a surrogate pair, which UTF-8 cannot write, becomes JSON's escape for it.
    summary = wanted.output / SUMMARY
    with naming(summary):
        summary.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    return results


def shown(interval: Interval | None) -> str:
    """A mean with its bounds; a dash for none."""
    if interval is None:
        return "–"
    bounds = "" if interval.low != interval.low else f"\n[{interval.low:.3f}, {interval.high:.3f}]"
    return f"{interval.mean:.3f}{bounds}"


def coverage(figure: Figure) -> str:
    """The number of samples that were scored, and those that were not, by outcome."""
    lines = [f"{figure.scored} of {figure.scored + sum(figure.unscored.values())}"]
    lines += [f"{count} {outcome.replace('_', ' ')}" for outcome, count in figure.unscored.items()]
    return "\n".join(lines)


def fields_of(given: Sequence[str]) -> dict[str, Any]:
    """The fields that `--field NAME=JSON` gives. ConfigError if one has no such form."""
    fields = {}
    for each in given:
        name, equals, text = each.partition("=")
        try:
            if not name or not equals:
                raise ValueError
            fields[name] = strict_json(text)
        except (ValueError, RecursionError):
            raise ConfigError(
                f'--field: should be NAME=JSON, such as top_p=0.9 or stop=["END"], got {each!r}'
            ) from None
    return fields
