"""Scorers whose scores a function gives: the user's own, and the kinds that `services.reward.scorers.kinds` holds.

Each kind is a class here and a module of its name there, whose `make` gets the fields of the class.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from quartet.config.base import Config, ConfigError, Count, ModelPath, Seconds, matching
from quartet.config.functions import PATH, load_function, source_of
from quartet.config.limits import LimitsConfig
from quartet.config.scores import AnyScoreName, ScoreName
from quartet.security.credentials import VARIABLE as CREDENTIALS
from quartet.security.port import on_loopback

TARGET = r"[\w.\-\[\]:]+:\d{1,5}"
_MODULES = Path(__file__).parent / "scorers/kinds"


def _pattern(text: str) -> str:
    import regex

    try:
        regex.compile(text)
    except (regex.error, ValueError, RecursionError) as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]
"""A regular expression of the package regex, which knows all of Python's own."""
Variable = Annotated[str, matching(r"[A-Za-z_]\w*", "the name of a variable of the environment")]


class OwnConfig(Config):
    """Settings that a scorer may have of its own; null: as in the application's args."""

    tokenizer: ModelPath | None = None
    """Folder of the tokenizer of the requests' token ids."""
    max_length: Count | None = None
    """Longest prompt + response, in tokens."""
    limits: LimitsConfig | None = None
    """Limits on waiting calls, their shares among callers, and the time of a pass."""


class WorkerScorerConfig(OwnConfig):
    """The processes of a scorer whose scores a function gives."""

    PACKAGES: ClassVar[tuple[str, ...]] = ()
    """Packages that the kind needs beside those that every service has."""
    ALSO: ClassVar[tuple[str, ...]] = ()
    """Further modules of `kinds` that are part of its code."""
    FIELD: ClassVar[str] = "kind"
    """The key that errors of its function name."""

    kind: str
    """Kind of the scorer."""
    pair_timeout_s: Seconds = 10
    """Longest time that may be spent on one pair, in seconds. A process that is longer at one is killed; that pair
    has the outcome TIMEOUT, and all others of its batch are scored by another process. limits.batch_s does not
    count."""
    workers: Annotated[int, Field(ge=1, le=64)] = 4
    """Most processes at the same time, each with one batch. They are started as they are needed. More than the cores,
    so that others go on while some wait or hang."""
    memory_gib: Annotated[float, Field(gt=0)] = 4.0
    """Most memory of each process, in GiB, shared files and libraries not counted. A pair for which the function
    needs more has the outcome FAILED."""
    environment: tuple[Variable, ...] = ()
    """Names of variables of the service's environment that the function may read, such as that of a key. Of all
    others it has a few without secrets, such as PATH."""
    batch_tokens: Count = 16_384
    """Most tokens of the pairs in one call of the function."""
    concurrency: Count = 64
    """Most pairs of an async function in each process at the same time."""

    @property
    def title(self) -> str:
        """The name of the kind, in the scorer's identity and in errors."""
        return self.kind

    @property
    def function_path(self) -> str:
        """`module:name` of the function that makes the scorer's."""
        return f"services.reward.scorers.kinds.{self.title}:make"

    @property
    def options(self) -> dict[str, Any] | None:
        """The fields that belong to the kind; None for a function that is used as it is."""
        own = self.model_dump(mode="json", exclude={*WorkerScorerConfig.model_fields})
        return own | {"pair_timeout_s": self.pair_timeout_s}

    @property
    def variables(self) -> tuple[str, ...]:
        """All variables of the environment that the processes get."""
        return self.environment

    @property
    def source(self) -> str:
        """The text by which the scorer is identified: its code and its fields. Empty if a process has to read it."""
        code = [(_MODULES / f"{name}.py").read_text() for name in (self.title, "answers", *self.ALSO)]
        versions = [f"{package} {version(package)}" for package in self.PACKAGES]
        fields = {name: value for name, value in (self.options or {}).items() if name != "pair_timeout_s"}
        return "\n".join([*code, *versions, json.dumps(fields, sort_keys=True)])

    def check_machine(self, where: str) -> None:
        """Raises ConfigError, at `where`, if this machine lacks what the scorer needs."""
        for package in self.PACKAGES:
            try:
                version(package)
            except PackageNotFoundError:
                raise ConfigError(
                    f"{where}.kind: {self.title} needs the package {package}, which is not installed here: "
                    f"pip install {package}"
                ) from None
        for name in self.variables:
            if not os.environ.get(name):
                field = "environment" if name in self.environment else "api_key"
                raise ConfigError(f"{where}.{field}: the variable {name} is not set in the environment")

    def check(self, where: str) -> None:
        """Raises ConfigError, at `where`, if the scorer cannot start here; for `quartet check`."""
        self.check_machine(where)


class FunctionScorerConfig(WorkerScorerConfig):
    """A Python function of texts."""

    FIELD = "function"

    kind: Literal["function"]
    """Kind of the scorer."""
    function: Annotated[str, matching(PATH, "package.module:function")]
    """`package.module:function`, which takes a sequence of Pair (quartet/wire/pairs.py) and returns a score for each.
    An async function is called with one pair at a time, for all pairs at once on one event loop."""
    names: tuple[ScoreName, ...] = ()
    """Names of the scores, if the function gives several for each pair: it then returns a mapping of exactly these
    names to numbers for each. Empty: it returns a number for each."""
    process: bool = False
    """The function may return a ProcessReward (quartet/wire/pairs.py) for a pair: a score of which parts are earned
    within the response. A run then gives each part to the token that earns it."""

    def _problems(self) -> Iterator[str]:
        if len({*self.names}) < len(self.names):
            yield f"names: {', '.join(self.names)} has one twice; give each score a name of its own"
        if self.names and self.process:
            yield "process: true, but scores with names are earned at the end of a response; leave one of them out"

    @property
    def title(self) -> str:
        """The kind and the path."""
        return f"function:{self.function}"

    @property
    def function_path(self) -> str:
        """The user's function."""
        return self.function

    @property
    def options(self) -> None:
        """No options, as the function is used as it is."""
        return None

    @property
    def source(self) -> str:
        """Empty: a worker process reads the function's source when it imports it."""
        return ""

    def check(self, where: str) -> None:
        """Checks the machine and imports the function."""
        super().check(where)
        self.code_hash(where)

    def code_hash(self, where: str) -> str:
        """The hash by which the function is identified, of its code on this machine as it is now. ConfigError, at
        `where`, if it cannot be imported."""
        field = f"{where}.{self.FIELD}"
        code = source_of(load_function(self.function, field, asynchronous=True), self.function, field)
        return hashlib.sha256(code.encode()).hexdigest()


class _Kind(WorkerScorerConfig):
    """A kind whose pairs have one score each."""

    names: ClassVar[tuple[str, ...]] = ()
    """Names of the scores of a pair: none, as there is one."""


class _AnswerKind(_Kind):
    """A kind that compares an answer in the response with the expected one."""

    expected: str = ""
    """Column of the pair that holds what is expected. Empty: its label."""
    extract: Pattern = ""
    """Regular expression of the answer in the response: its first group, or the whole of it if it has none; the last
    match counts, and a response without one scores 0. Empty: the whole response."""

    @property
    def needed(self) -> tuple[str, str] | None:
        """The field that names a column without which no pair has a score, and that column, empty for the label; None
        if there is none."""
        return "expected", self.expected


Normalisation = Literal["strip", "case", "spaces", "punctuation", "articles", "unicode", "numbers"]


class ExactScorerConfig(_AnswerKind):
    """1 if the answer is the expected text, else 0."""

    kind: Literal["exact"]
    """Kind of the scorer."""
    normalise: tuple[Normalisation, ...] = ("strip",)
    """Changes of both texts before they are compared, in this order. strip: no blanks around them; case: lower case;
    spaces: one blank for each run of blanks; punctuation: none; articles: no `a`, `an`, `the`; unicode: NFKC;
    numbers: a text that is a number is compared as one, without `$`, `%` and commas between digits."""


class RegexScorerConfig(_AnswerKind):
    """1 if the regular expression matches the answer, else 0."""

    kind: Literal["regex"]
    """Kind of the scorer."""
    pattern: Pattern = ""
    """The regular expression, of the package regex. Empty: that of each pair, in the place of the expected answer."""
    whole: bool = False
    """Match the whole answer, not some part of it."""

    @property
    def needed(self) -> tuple[str, str] | None:
        """The column of the pattern, if each pair has its own."""
        return None if self.pattern else super().needed


class ColumnScorerConfig(_Kind):
    """The number in a column of the pair: what an agent returned, or what a data set holds."""

    kind: Literal["column"]
    """Kind of the scorer."""
    column: Annotated[str, Field(min_length=1)] = "result"
    """Name of the column. An agent's result is in `result`."""
    missing: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Score of a pair without the column, or with null in it, such as a conversation without room for another
    response, at which its agent raised an error. Null: it has no score, which ends a run unless
    `orchestrator.unscored` drops it."""

    @property
    def needed(self) -> tuple[str, str] | None:
        """The column of the number, unless there is one for pairs without."""
        return ("column", self.column) if self.missing is None else None


class JsonSchemaScorerConfig(_AnswerKind):
    """1 if the answer is JSON that the schema admits, else 0."""

    kind: Literal["json_schema"]
    """Kind of the scorer."""
    json_schema: dict[str, Any] = Field(default_factory=dict)
    """The schema, by default of draft 2020-12. Empty: that of each pair, in the place of the expected answer.
    References to other documents are refused, as nothing is fetched."""

    @property
    def needed(self) -> tuple[str, str] | None:
        """The column of the schema, if each pair has its own."""
        return None if self.json_schema else super().needed

    def _problems(self) -> Iterator[str]:
        import jsonschema

        try:
            if not isinstance(self.json_schema.get("$schema", ""), str):
                raise ValueError
            default = jsonschema.Draft202012Validator
            kind = jsonschema.validators.validator_for(self.json_schema, default=default)
            kind.check_schema(self.json_schema)
        except jsonschema.SchemaError as error:
            yield f"json_schema: is no schema: {error.message} at {error.json_path}"
            return
        except ValueError:
            yield "json_schema: $schema should be an address, such as https://json-schema.org/draft/2020-12/schema"
            return
        if outside := next((ref for ref in _references(self.json_schema) if not ref.startswith("#")), ""):
            yield f"json_schema: refers to {outside!r}, which would have to be fetched; copy it into $defs"
            return
        # What only a $ref says is a schema is not looked at above.
        for text in ("null", "{}", "[]", '""', "0"):
            try:
                kind(self.json_schema).is_valid(json.loads(text))
            except Exception as error:
                yield f"json_schema: cannot be applied to {text}: {type(error).__name__}: {error}"
                return


class MathScorerConfig(_AnswerKind):
    """1 if the answer equals the expected one as mathematics, by math-verify, else 0: `\\frac{1}{2}` is 0.5."""

    PACKAGES = ("math-verify",)

    kind: Literal["math"]
    """Kind of the scorer."""
    digits: Annotated[int, Field(ge=1, le=15)] = 6
    """Decimal places that have to be equal where both are numbers."""
    strict: bool = True
    """Sets are not intervals, and names of variables count."""


class CodeScorerConfig(_AnswerKind):
    """The share of tests that a program in the response passes, each in a process with limits of its own.

    The tests are the expected answer: Python with asserts, or JSON: a list of such texts, or an object of `inputs`
    and `outputs`, lists of what the program reads and has to write.
    """

    ALSO = ("sandbox",)

    kind: Literal["code"]
    """Kind of the scorer."""
    extract: Pattern = r"(?s)```(?:py(?:thon)?)?[ \t]*\n(.*?)```"
    """Regular expression of the program in the response; the last match counts, and a response without one is taken
    as a program as a whole."""
    all_or_nothing: bool = False
    """1 if all tests pass, else 0."""
    pair_timeout_s: Seconds = 60
    """Longest time that may be spent on one pair, in seconds. Tests that are not reached in four fifths of it count
    as not passed."""
    test_s: Seconds = 3
    """Longest time of one test, in seconds; a test that takes longer has not passed."""
    most_tests: Count = 20
    """Most tests of a pair that are run, the first ones."""
    test_memory_mib: Annotated[int, Field(ge=64)] = 512
    """Most memory of a test, in MiB."""
    network: bool = False
    """Tests may reach the network. False: each has a network of its own with nothing in it; the service does not
    start where the kernel gives an ordinary user none. Where it gives none and this is true, tests may also send
    signals to the processes of the service's user, and have as many as it."""


class JudgeScorerConfig(_Kind):
    """The score that a language model gives, behind an endpoint that speaks OpenAI's protocol."""

    kind: Literal["judge"]
    """Kind of the scorer."""
    pair_timeout_s: Seconds = 60
    """Longest time that may be spent on one pair, in seconds, with all that is asked again."""
    url: Annotated[str, matching(r"https?://[^\s?#]+", "http(s)://host:port/v1")]
    """Address of the endpoint, up to and with `/v1`."""
    model: str
    """Name of the model, as the endpoint knows it."""
    rubric: Annotated[str, Field(min_length=1)]
    """The instructions: what is good, and in which form the score has to be given."""
    template: str = ""
    """The message with what is judged: `{prompt}`, `{response}`, `{label}` and each column's `{name}` are put in;
    with `against` `{first}` and `{second}`. Each is set between marks that a response cannot know. Empty: the prompt,
    and what is judged."""
    score: Pattern = r"(?i)score[^\w-]{0,5}(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the score in the judge's answer; the last match counts."""
    lowest: float = 0.0
    """Least score; a number below counts as none."""
    highest: float = 10.0
    """Largest score; a number above counts as none."""
    unparseable: Literal["fail"] | float = "fail"
    """Worth of an answer without a score: the outcome FAILED, or this number, with `against` in either order."""
    against: str = ""
    """Compare the response with this column, or the `label`: the judge is asked twice, with the positions swapped. It
    gives `highest` where the first is better and `lowest` where the second is, and the score is the mean of both
    verdicts. Empty: no comparison."""
    api_key: Variable | Literal[""] = ""
    """Variable of the service's environment that holds the key. Empty: none is sent."""
    concurrency: Count = 16
    """Most requests of each process at the same time."""
    max_tokens: Count = 1024
    """Most tokens of the judge's answer."""
    extra: dict[str, Any] = Field(default_factory=lambda: {"temperature": 0})
    """Further fields of the request."""

    @property
    def options(self) -> dict[str, Any]:
        """The same, with the whole template."""
        judged = "First answer:\n{first}\n\nSecond answer:\n{second}" if self.against else "Answer:\n{response}"
        return {**(super().options or {}), "template": self.template or f"Question:\n{{prompt}}\n\n{judged}"}

    @property
    def variables(self) -> tuple[str, ...]:
        """The same, with that of the key."""
        return (*self.environment, *([self.api_key] if self.api_key else []))

    def _problems(self) -> Iterator[str]:
        wanted = ("{first}", "{second}") if self.against else ("{response}",)
        if missing := [each for each in wanted if self.template and each not in self.template]:
            yield f"template: lacks {', '.join(missing)}"
        if self.lowest >= self.highest:
            yield f"highest: {self.highest:g}; should be more than lowest, {self.lowest:g}"
        yield from _in_the_clear(self.url, self.api_key)


class RemoteScorerConfig(WorkerScorerConfig):
    """The scores of a scorer of another reward service, asked over gRPC (`target`) or over HTTP (`url`) with texts or
    conversations."""

    kind: Literal["remote"]
    """Kind of the scorer."""
    pair_timeout_s: Seconds = 60
    """Longest time, in seconds, that the service may take for a batch of pairs, with all that is repeated."""
    target: Annotated[str, matching(rf"({TARGET})?", "host:port of the service")] = ""
    """Host and port of the service, for gRPC. The variable QUARTET_CREDENTIALS of this service's environment names
    the credentials for it."""
    application: str = "reward"
    """Name of its application, for gRPC."""
    url: Annotated[str, matching(r"(https?://[^\s?#@]+)?", "http(s)://host:port/reward")] = ""
    """Address of the service, for HTTP, up to and without `/v1`. No redirect is followed."""
    api_key: Variable | Literal[""] = ""
    """Variable of the service's environment that holds the key, for HTTP. Empty: none is sent."""
    scorer: str = ""
    """Name of the scorer in the application. Empty: the only one."""
    names: tuple[AnyScoreName, ...] = ()
    """Names of its scores, in its order, if it gives several for each pair."""

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables named, that of the key, and that of the credentials if it is set."""
        key = [self.api_key] if self.api_key else []
        return (*self.environment, *key, *([CREDENTIALS] if os.environ.get(CREDENTIALS) else []))

    def _problems(self) -> Iterator[str]:
        if bool(self.target) == bool(self.url):
            yield "target: give this, for gRPC, or url, for HTTP; one of them"
        others = {"api_key"} if self.target else {"application"}
        if wrong := sorted(others & self.model_fields_set):
            yield f"{wrong[0]}: belongs to {'url' if self.target else 'target'}"
        yield from _in_the_clear(self.url, self.api_key)

    @property
    def source(self) -> str:
        """Empty: the service says who the scorer is, and its address does not matter."""
        return ""


def _in_the_clear(url: str, key: str) -> Iterator[str]:
    """Yields what is wrong where a key would cross a network in the clear."""
    if key and url.startswith("http:") and not on_loopback(urlsplit(url).hostname or ""):
        yield f"url: {url} would get the key in the clear; use https"


def _references(schema: Any) -> list[str]:
    """All `$ref` in a schema."""
    if isinstance(schema, dict):
        own = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
        return own + [ref for value in schema.values() for ref in _references(value)]
    return [ref for value in schema for ref in _references(value)] if isinstance(schema, list) else []


AnyWorkerScorerConfig = (
    FunctionScorerConfig
    | ExactScorerConfig
    | RegexScorerConfig
    | ColumnScorerConfig
    | JsonSchemaScorerConfig
    | MathScorerConfig
    | CodeScorerConfig
    | JudgeScorerConfig
    | RemoteScorerConfig
)
