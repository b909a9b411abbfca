"""The documentation names commands, files, functions and pages that exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "benchmarks/RESULTS.md", "benchmarks/lent/README.md")),
    *sorted(ROOT.glob("docs/*.md")),
]
FOLDERS = "orchestrator|quartet|services|protos|deploy|recipes|examples|constraints|tests|benchmarks"
CODE = rf"(?<![\w./])((?:{FOLDERS})/[\w./-]+?)(?:`|(?<=\.py)\b)"
COMMAND = r"python -m\s+([\w.]+)|`(benchmarks\.[\w.]+)"
WAY = ROOT / "docs/architecture.md"
"""The page with the way of a sample: a table of files and functions."""


def check() -> Iterator[str]:
    """A line for each name that is not there."""
    for page in PAGES:
        yield from (f"{page.relative_to(ROOT)}: {name} does not exist" for name in missing(page))
        yield from (f"{page.relative_to(ROOT)}: {name} is no command" for name in no_commands(page.read_text()))
        yield from (f"{page.relative_to(ROOT)}: there is no heading {link}" for link in headless(page))
    yield from unknown_functions(WAY.read_text())


def missing(page: Path) -> list[str]:
    """The files that a page names or links to and that are not there."""
    text = page.read_text()
    named = {ROOT / name for name in re.findall(CODE, text) if "<" not in name}
    linked = {page.parent / link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)}
    return sorted(str(path) for path in named | linked if not path.exists())


def no_commands(text: str) -> list[str]:
    """The modules of this project that a text has Python run and that are none to run."""
    names = {(module or benchmark).rstrip(".") for module, benchmark in re.findall(COMMAND, text)}
    ours = {name for name in names if (ROOT / name.partition(".")[0]).is_dir() and name.islower()}
    return sorted(name for name in ours if not _runs(ROOT / name.replace(".", "/")))


def _runs(module: Path) -> bool:
    file = module.with_suffix(".py")
    return (module / "__main__.py").exists() or (file.exists() and "__main__" in file.read_text())


def headless(page: Path) -> list[str]:
    """The links of a page to a heading that their page does not have."""
    links = re.findall(r"\]\(([^)#:]*\.md)?#([^)]+)\)", page.read_text())
    pages = {(page.parent / name if name else page, heading) for name, heading in links}
    return sorted(f"{path.name}#{heading}" for path, heading in pages if heading not in headings(path))


def headings(page: Path) -> set[str]:
    """The headings of a page as links name them: in lower case, with hyphens for blanks, without other signs."""
    text = re.sub(r"^```.*?^```", "", page.read_text() if page.exists() else "", flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def unknown_functions(text: str) -> Iterator[str]:
    """A line for each function of the way of a sample that its files do not define."""
    rows = re.findall(r"^\| [^|]+ \| (`[^|]+`) \| (`[^|]+`) \|$", text, re.MULTILINE)
    if len(rows) < 10:
        yield f"{WAY.relative_to(ROOT)}: the way of a sample has {len(rows)} rows"
    for files, functions in rows:
        defined = set[str]()
        for name in re.findall(r"`([^`]+)`", files):
            path = ROOT / name
            for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
                defined |= _definitions(file)
        for function in re.findall(r"`([^`]+)`", functions):
            if function not in defined:
                yield f"{WAY.relative_to(ROOT)}: {function} is not in {files}"


def _definitions(file: Path) -> set[str]:
    """Names of functions, and `Class.method` of methods."""
    actual = set[str]()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            actual.add(node.name)
        if isinstance(node, ast.ClassDef):
            actual |= {
                f"{node.name}.{f.name}" for f in node.body if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return actual
