"""Kinds of scorers that check an answer by a rule, each in its worker processes."""

import asyncio
import contextlib
import ctypes
import json
import math
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from quartet.config.base import ConfigError
from quartet.wire.pairs import Pair
from services.reward.config import RewardConfig, ScorerConfig
from services.reward.scorers.function import FunctionScorer
from services.reward.scorers.kinds import code as code_kind
from services.reward.scorers.kinds.code import NotBegunError, make
from tests.unit.scorer_calls import batcher, scored

NOT_APPLICABLE, TIMEOUT = "NOT_APPLICABLE", "TIMEOUT"


def config(**fields: Any) -> Any:
    return TypeAdapter[Any](ScorerConfig).validate_json(json.dumps(fields))


def made(**fields: Any) -> FunctionScorer:
    return FunctionScorer(config(**fields))


def told(scorer: FunctionScorer, pairs: Sequence[tuple[str, str] | Pair]) -> list[Any]:
    """The scores of pairs, each a response and a label, or the outcomes of those without one."""
    whole = [each if isinstance(each, Pair) else Pair("", each[0], each[1]) for each in pairs]

    async def all_of_them() -> Any:
        return (await scored(batcher(scorer), whole)).told

    return list(asyncio.run(all_of_them()))


@pytest.mark.parametrize(
    ("fields", "cases"),
    [
        ({}, {("7", "7"): 1, (" 7\n", "7"): 1, ("seven", "7"): 0, ("7", ""): NOT_APPLICABLE, ("Yes", "yes"): 0}),
        (
            {"extract": r"answer is (\S+)", "normalise": ["case"]},
            {("answer is A or answer is B", "b"): 1, ("A", "A"): 0},
        ),
        ({"extract": r"\d+"}, {("6, or else 77", "77"): 1, ("none", "none"): 0}),
        ({"extract": r"(\d)/(\d)"}, {("6/7", "6"): 1, ("6/7", "7"): 0}),
        (
            {"normalise": ["unicode", "case", "punctuation", "articles", "spaces", "strip"]},
            {("The  Eiffel\nTower!", "eiffel tower"): 1, ("ﬁne", "fine"): 1, ("an eiffel", "the eifel"): 0},
        ),
        (
            {"normalise": ["numbers"]},
            {
                **{("$1,234.50", "1234.5"): 1, ("7.0", "7"): 1, ("-0", "0"): 1, ("1e3", "1000"): 1, ("12", "1,2"): 0},
                **{("1" * 30, "1" * 29 + "2"): 0, ("1" * 30 + ".00", "1" * 30): 1, ("NaN", "nan"): 0},
                **{("1e1000000", "7"): 0, ("10e999999", "1e1000000"): 1, ("-0.50", "-.5"): 1, ("-5", "5"): 0},
            },
        ),
    ],
)
def test_exact(fields: dict[str, Any], cases: Mapping[tuple[str, str], Any]) -> None:
    assert told(made(kind="exact", **fields), [*cases]) == [*cases.values()]


def test_what_is_expected_may_be_in_a_column() -> None:
    scorer = made(kind="exact", expected="answer", normalise=["numbers"])
    columns: list[dict[str, Any]] = [{"answer": "7"}, {"answer": 7}, {"answer": 7.5}, {"answer": None}, {}]
    assert told(scorer, [Pair("", "7", columns=each) for each in columns]) == [
        1,
        1,
        0,
        NOT_APPLICABLE,
        NOT_APPLICABLE,
    ]


def test_the_last_response_of_a_conversation_is_the_answer() -> None:
    pair = Pair("", "6 wrong 7", "7", texts=("6", " wrong ", "7"))
    assert told(made(kind="exact"), [pair]) == [1]


def test_regular_expressions() -> None:
    scorer = made(kind="regex", pattern=r"(?s)<think>.*</think>\s*\S", pair_timeout_s=5.0)
    assert told(scorer, [("<think>\nso\n</think> 7", ""), ("7", ""), ("<think></think>", "")]) == [1, 0, 0]
    whole = made(kind="regex", pattern=r"\d+", whole=True)
    assert told(whole, [("77", ""), ("77 ", "")]) == [1, 0]
    own = made(kind="regex")
    labels = ["(", "{8{6s<[#", ""]
    wrong = [NOT_APPLICABLE] * len(labels)
    assert told(own, [("7", r"^\d$"), ("x", r"^\d$"), *(("7", each) for each in labels)]) == [1, 0, *wrong]


def test_a_column_holds_the_score_itself() -> None:
    values: list[Any] = [0.25, 3, True, "0.5", None, [1], math.inf, 10**400]
    none = [NOT_APPLICABLE] * 5
    scorer = made(kind="column")
    assert told(scorer, [Pair("", "", columns={"result": value}) for value in values]) == [0.25, 3, 1, *none]
    assert told(made(kind="column", column="quality"), [Pair("", "", columns={"quality": 7}), ("", "")]) == [
        7,
        NOT_APPLICABLE,
    ]


def test_a_pair_without_the_column_has_the_score_that_is_said() -> None:
    scorer = made(kind="column", missing=-1)
    columns: list[dict[str, Any]] = [{"result": 0.5}, {}, {"result": None}, {"result": "x"}]
    assert told(scorer, [Pair("", "", columns=each) for each in columns]) == [0.5, -1, -1, NOT_APPLICABLE]
    with pytest.raises(ValidationError, match="missing"):
        config(kind="column", missing=math.inf)


def test_a_regular_expression_without_end_costs_its_pair_alone() -> None:
    scorer = made(kind="regex", pattern=r"(a|aa)+$", pair_timeout_s=1.0)
    assert told(scorer, [("a", ""), ("a" * 60 + "b", ""), ("c", "")]) == [1, TIMEOUT, 0]


BEHIND_REFERENCES: tuple[dict[str, Any], ...] = (
    {"x": {"pattern": "("}, "$ref": "#/x"},
    {"x": 1, "$ref": "#/x"},
    {"x": {"type": "nonsense"}, "$ref": "#/x"},
    {"x": {"multipleOf": 0}, "$ref": "#/x"},
    {"$ref": "#/x"},
)
"""Schemas with something that is none where only a reference looks."""


def test_json_schemas() -> None:
    schema = {"type": "object", "required": ["name"], "properties": {"name": {"$ref": "#/$defs/name"}}}
    schema["$defs"] = {"name": {"type": "string", "minLength": 2}}
    scorer = made(kind="json_schema", json_schema=schema)
    responses = ['{"name": "ab"}', '{"name": "a"}', "[]", "{", '{"name": "ab", "n": NaN}', "[" * 100_000]
    assert told(scorer, [(each, "") for each in responses]) == [1, 0, 0, 0, 0, 0]
    fenced = made(kind="json_schema", json_schema=schema, extract=r"(?s)```json\n(.*?)```")
    assert told(fenced, [('Here:\n```json\n{"name": "ab"}\n```', ""), ('{"name": "ab"}', "")]) == [1, 0]
    own = made(kind="json_schema", expected="schema")
    columns: list[Any] = [{"type": "array"}, '{"type": "object"}', {"type": "nonsense"}, "no JSON", 7]
    columns += [{"$schema": 3}, {"$schema": []}, {"$schema": None}, {"$schema": "http://["}]
    pairs = [Pair("", "[]", columns={"schema": each}) for each in columns]
    assert told(own, pairs) == [1, 0, *[NOT_APPLICABLE] * 7]
    cents = made(kind="json_schema", json_schema={"multipleOf": 0.01})
    assert told(cents, [(each, "") for each in ("0.25", "0.255", "1e999", "1" + "0" * 400)]) == [1, 0, 0, 0]
    away = Pair("", "[]", columns={"schema": {"$ref": "http://127.0.0.1:1/schema"}})
    assert told(own, [away]) == [NOT_APPLICABLE]
    for behind in BEHIND_REFERENCES:
        given = [Pair("", response, columns={"schema": behind}) for response in ('""', "[]", "1", '{"a": 1}', "null")]
        assert NOT_APPLICABLE in told(own, given)
        assert {*told(own, given)} <= {0, 1, NOT_APPLICABLE}


def test_mathematics() -> None:
    cases = {
        (r"So it is $\frac{1}{2}$.", "0.5"): 1,
        (r"\boxed{2x + 2}", "$2(x+1)$"): 1,
        ("The answer is 42", "42"): 1,
        ("The answer is 41", "42"): 0,
        ("I do not know", "42"): 0,
        (r"$\{1, 2\}$", r"\{2, 1\}"): 1,
        ("42", "$"): NOT_APPLICABLE,
        (r"$x + 1$", "1 + x"): 1,
    }
    assert told(made(kind="math"), [*cases]) == [*cases.values()]
    near = [("0.3333", "0.3334"), ("$x + 1$", "$y + 1$")]
    assert told(made(kind="math"), near) == [0, 0]
    assert told(made(kind="math", digits=2), near) == [1, 0]
    assert told(made(kind="math", strict=False), near) == [0, 1]


@pytest.mark.parametrize(
    ("fields", "right", "monster"),
    [
        ({"kind": "math"}, Pair("", "42", "42"), Pair("", "$10^{10^{10^{10}}}$", "42")),
        ({"kind": "math"}, Pair("", "42", "42"), Pair("", "42", "$100000!!!$")),
        (
            {"kind": "json_schema", "expected": "schema"},
            Pair("", "1", columns={"schema": {"minimum": 1}}),
            Pair("", f'"{"a" * 60}b"', columns={"schema": {"pattern": "^(a|aa)+$"}}),
        ),
    ],
    ids=["number", "expected number", "pattern"],
)
def test_what_takes_for_ever_costs_its_pair_alone(fields: dict[str, Any], right: Pair, monster: Pair) -> None:
    scorer = made(**fields, pair_timeout_s=5.0, memory_gib=1.0)
    first, at_fault, last = told(scorer, [right, monster, right])
    assert (first, last) == (1, 1)
    assert at_fault in (TIMEOUT, "FAILED")


ASSERTS = "assert double(2) == 4\nassert double(-1) == -2"


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\n"


@pytest.fixture(scope="module")
def code() -> FunctionScorer:
    """Without a network of its own where this machine's kernel gives none."""
    fields = {"kind": "code", "test_s": 10.0, "pair_timeout_s": 200.0}
    with contextlib.suppress(ConfigError):
        return made(**fields)
    return made(**fields, network=True)


def has_namespaces() -> bool:
    """True if this machine's kernel gives an ordinary user namespaces of its own."""
    return (
        subprocess.run(["unshare", "--user", "--pid", "--fork", "true"], check=False, capture_output=True).returncode
        == 0
    )


def options_of(scorer: FunctionScorer) -> dict[str, Any]:
    """Text that its function is made of."""
    assert scorer._config.options is not None
    return scorer._config.options


def test_programs_pass_their_asserts(code: FunctionScorer) -> None:
    right, wrong = "def double(x):\n    return 2 * x", "def double(x):\n    return x + 2"
    lists = json.dumps(["assert double(2) == 4", "assert double(3) == 6"])
    cases = {
        (fenced(right), ASSERTS): 1,
        (right, ASSERTS): 1,
        (fenced(wrong), ASSERTS): 0,
        (fenced(wrong), lists): 0.5,
        (fenced("def double(x:"), ASSERTS): 0,
        (fenced(f"{right}\nimport sys\nsys.exit(0)"), ASSERTS): 0,
        (fenced(f"{right}\nimport os\nos._exit(0)"), ASSERTS): 0,
        (fenced(right), ""): NOT_APPLICABLE,
        (fenced(right), json.dumps(ASSERTS)): 1,
        **{(fenced(right), tests): NOT_APPLICABLE for tests in ("[7]", "[]", " ")},
        (fenced(right), "[" * 100_000): 0,
    }
    assert told(code, [*cases]) == [*cases.values()]


def test_programs_write_what_is_expected(code: FunctionScorer) -> None:
    tests = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3", "7"]})
    adds = "a, b = map(int, input().split())\nprint(a + b)"
    cases = {
        (fenced(adds), tests): 1,
        (fenced(f"{adds}\nimport sys\nsys.exit()"), tests): 1,
        (fenced("print(3)"), tests): 0.5,
        (fenced(f"import sys\n{adds}\nsys.stdout.flush()\nraise ValueError"), tests): 0,
        (fenced("print('x' * 10 ** 9)"), tests): 0,
        (
            fenced(r"print(input(), input(), sep=' \n')"),
            json.dumps({"inputs": [["1", "x"]], "outputs": [["1", "x"]]}),
        ): 1,
        (fenced(adds), json.dumps({"inputs": ["1 2"], "outputs": [3]})): 1,
        (fenced(adds), json.dumps({"inputs": ["1 2"], "outputs": []})): NOT_APPLICABLE,
        (fenced(adds), json.dumps({"inputs": [], "outputs": []})): NOT_APPLICABLE,
    }
    assert told(code, [*cases]) == [*cases.values()]


def test_all_or_nothing_and_the_first_tests_only(code: FunctionScorer) -> None:
    pairs = [Pair("", "x = 1", json.dumps(["assert x == 1", "assert x == 2", "assert x == 1"]))]
    options = options_of(code)
    assert make(options | {"all_or_nothing": True})(pairs) == [0]
    assert make(options | {"most_tests": 2})(pairs) == [0.5]
    assert make(options | {"all_or_nothing": True, "most_tests": 1})(pairs) == [1]


def test_the_tests_of_a_pair_share_its_time(code: FunctionScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    now, spent = [100.0], []

    def run(_: Any, program: str, given: str, seconds: float, *, may_exit: bool, begin_s: float) -> tuple[bool, str]:
        spent.append((seconds, begin_s))
        now[0] += seconds
        return False, ""

    score = make(options_of(code) | {"pair_timeout_s": 10.0, "test_s": 3.0})
    monkeypatch.setattr(code_kind, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(code_kind.Sandbox, "run", run)
    assert score([Pair("", "", json.dumps(["pass"] * 5))]) == [0]
    assert spent == [(3.0, 1.5), (3.0, 1.5), (2.0, 1.5)]


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "import time\ntime.sleep(60)"])
def test_a_sandbox_that_fails_is_no_test_that_fails(
    code: FunctionScorer, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of(code) | {"pair_timeout_s": 4.0}
    score = make(options)
    assert score([Pair("", "", "raise ValueError"), Pair("", "", "pass")]) == [0, 1]
    other = tmp_path / "sandbox.py"
    other.write_text(program)
    monkeypatch.setattr("services.reward.scorers.kinds.sandbox.__file__", str(other))
    with pytest.raises(NotBegunError):
        score([Pair("", "", "pass")])


def test_a_kernel_without_namespaces_is_told_when_the_scorer_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: FunctionScorer
) -> None:
    other = tmp_path / "sandbox.py"
    other.write_text("raise SystemExit(3)")
    monkeypatch.setattr("services.reward.scorers.kinds.sandbox.__file__", str(other))
    with pytest.raises(RuntimeError, match=r"^a program cannot be run .* set network: true$"):
        make(options_of(code) | {"network": False})


def test_folders_in_folders_cost_no_score_and_are_removed(
    code: FunctionScorer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    deep = "import os\nfor _ in range(1100):\n    os.mkdir('d')\n    os.chdir('d')"
    assert make(options_of(code))([Pair("", deep, "pass")]) == [1]
    assert not [*tmp_path.iterdir()]


def has_landlock() -> bool:
    """True if this machine's kernel can keep a process out of folders."""
    return int(ctypes.CDLL(None).syscall(444, None, 0, 1)) > 0


@pytest.mark.parametrize("network", [False, True])
def test_programs_have_limits(network: bool, tmp_path: Path) -> None:
    """The last program passes, and the others do not."""
    if not network and not has_namespaces():
        with pytest.raises(ConfigError, match="set network: true"):
            made(kind="code")
        return
    served = socket.create_server(("127.0.0.1", 0))
    secret = tmp_path / "secret"
    secret.write_text("token")
    programs = {
        "memory": "held = bytearray(4 << 30)",
        "disk": "open('file', 'wb').write(bytes(64 << 20))",
        "processes": "import os, time\nfor _ in range(64):\n    os.fork() or time.sleep(9)\ntime.sleep(1)",
        "elsewhere": f"open({str(tmp_path / 'made')!r}, 'w')",
        "secret": f"assert open({str(secret)!r}).read() == 'token'",
        "environment": "import os\nassert 'HIDDEN' in os.environ",
        "network": f"import socket\nsocket.create_connection({served.getsockname()!r}, 1)",
        "signals": f"import os\nos.kill({os.getpid()}, 0)",
    }
    quick = made(kind="code", test_s=4.0, network=network)
    scores = told(quick, [(fenced(program), "pass") for program in [*programs.values(), "pass"]])
    passed = {name for name, score in zip([*programs, "pass"], scores, strict=True) if score}
    # What the kernel gives no means against is left to the user's own rights.
    allowed = set() if has_landlock() else {"elsewhere", "secret"}
    allowed |= {"network"} if network else set()
    allowed |= set() if has_namespaces() else {"signals", "processes"}
    assert passed == {"pass"} | allowed
    assert (tmp_path / "made").exists() == ("elsewhere" in allowed)
    served.close()


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ({"kind": "regex", "pattern": "("}, "scorer.pattern: is no regular expression: missing )"),
        ({"kind": "regex", "pattern": "{8{6s<[#"}, "scorer.pattern: is no regular expression: "),
        ({"kind": "exact", "extract": "[a"}, "scorer.extract: is no regular expression: "),
        ({"kind": "exact", "normalise": ["trim"]}, "scorer.normalise.0: "),
        ({"kind": "json_schema", "json_schema": {"type": 7}}, "json_schema: is no schema: 7 is not valid under"),
        ({"kind": "json_schema", "json_schema": {"$schema": 3}}, "json_schema: $schema should be an address, such"),
        (
            {"kind": "json_schema", "json_schema": {"$schema": "http://["}},
            "json_schema: $schema should be an address",
        ),
        (
            {"kind": "json_schema", "json_schema": {"$ref": "http://a/b"}},
            "json_schema: refers to 'http://a/b', which",
        ),
        *(
            ({"kind": "json_schema", "json_schema": behind}, "json_schema: cannot be applied to ")
            for behind in BEHIND_REFERENCES
        ),
        ({"kind": "regex", "pair_timeout_s": 0}, "scorer.pair_timeout_s: "),
        ({"kind": "code", "test_memory_mib": 1}, "scorer.test_memory_mib: "),
    ],
)
def test_what_cannot_work_is_refused_by_name(scorer: dict[str, Any], message: str, policy_folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"^reward.args.*{re.escape(message)}"):
        RewardConfig.parse({"tokenizer": str(policy_folder), "scorer": scorer}, "reward.args")


def test_what_is_missing_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(
        ConfigError, match=r"^a\.environment: the variable NO_SUCH_KEY is not set in the environment$"
    ):
        config(kind="exact", environment=("NO_SUCH_KEY",)).check("a")
    monkeypatch.setattr("services.reward.kinds.MathScorerConfig.PACKAGES", ("no-such-package",))
    with pytest.raises(
        ConfigError, match=r"^a\.kind: math needs the package no-such-package, which is not installed"
    ):
        config(kind="math").check("a")


def test_the_identity_of_code_follows_the_rules_of_its_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = config(kind="code").source
    shutil.copytree(Path(code_kind.__file__).parent, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr("services.reward.kinds._MODULES", tmp_path)
    assert config(kind="code").source == before
    sandbox = tmp_path / "sandbox.py"
    sandbox.write_text(sandbox.read_text().replace("_MOST_OPEN = 64", "_MOST_OPEN = 65"))
    assert config(kind="code").source != before


def test_a_scorers_identity_follows_its_fields() -> None:
    hashes = {
        made(kind="exact", **more).identity.model_hash for more in ({}, {"normalise": ["case"]}, {"workers": 2})
    }
    assert len(hashes) == 2
    with pytest.raises(ValidationError):
        config(kind="exact", normalise="case")
