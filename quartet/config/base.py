"""The base of every configuration: frozen, strict, and documented field by field."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from quartet.config.explain import explain, shown

Dtype = Literal["float32", "bfloat16"]
_MERGE = "tag:yaml.org,2002:merge"


class ConfigError(ValueError):
    """A configuration that cannot work. Its message names each field and what would be right."""


class Config(BaseModel):
    """Base of every section: a typo is an error, a value never changes, each field has a docstring."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    def _problems(self) -> Iterator[str]:
        """Reasons why fields do not go together that are right each by itself. A class yields its own; those of the
        classes above it come first."""
        yield from ()

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        for section in reversed(type(self).__mro__):
            for problem in vars(section).get("_problems", Config._problems)(self):
                raise ValueError(problem)
        return self

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str) -> Self:
        """Validates `values`, which stand at `where` in the user's file.

        Raises:
            ConfigError: one line for each wrong field, as `where.field: what is wrong`.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: should be a mapping of fields to values, got {shown(values)}")
        try:
            text = json.dumps(dict(values), default=str)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{where}: should hold plain values under plain names: {error}") from None
        try:
            # As JSON: there a list may be a tuple, which strict validation of Python objects refuses.
            parsed = cls.model_validate_json(text)
        except ValidationError as error:
            raise ConfigError(explain(error, cls, where)) from None
        if taken := [
            f"{where}.{path}: should be a number, got true or false" for path in _taken_for_numbers(parsed, values)
        ]:
            raise ConfigError("\n".join(taken))
        return parsed


def _taken_for_numbers(section: BaseModel, given: Mapping[str, Any]) -> Iterator[str]:
    """Paths at which true or false was taken for 1 or 0: pydantic is strict about numbers, but not in a Literal."""
    for name, value in given.items():
        parsed = getattr(section, name)
        if isinstance(parsed, BaseModel):
            yield from (f"{name}.{path}" for path in _taken_for_numbers(parsed, value))
        elif isinstance(value, bool) and not isinstance(parsed, bool):
            yield name


MOST_BYTES = 4 << 20
"""Most bytes of a YAML file, which takes seconds to read."""
MOST_VALUES, MOST_LEVELS = 100_000, 64
"""Most values of a YAML file, and most levels of values in values. A file of a few hundred bytes could otherwise
stand for more values than memory holds, by aliases of aliases."""
_TOO_DEEP = f"holds values in values, on more than {MOST_LEVELS} levels"


class _TwiceError(yaml.YAMLError):
    """A key is given twice in one mapping."""


class _RefusedError(yaml.YAMLError):
    """Too many values, or values on too many levels."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice; SafeLoader itself silently keeps the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Checks while the mapping is composed: later, keys from YAML merges can't be told from its own."""
        node = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in seen:
                    raise _TwiceError(f"line {line}: {key.value} is given already in line {seen[name]}; keep one")
                seen[name] = line
        return node


def _values(text: str) -> Any:
    """The values of a YAML document."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        size, depth = _extent(node, {})
        if depth > MOST_LEVELS:
            raise _RefusedError(_TOO_DEEP)
        if size > MOST_VALUES:
            raise _RefusedError(f"holds more than {MOST_VALUES} values, each alias (*name) counted with its contents")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _extent(node: yaml.Node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Number of values below a node, aliases counted as often as they are used, and number of levels."""
    if id(node) not in known:
        known[id(node)] = MOST_VALUES, MOST_LEVELS  # counts if the node holds itself
        below = [] if isinstance(node, yaml.ScalarNode) else list(node.value)
        parts = [part for entry in below for part in (entry if isinstance(entry, tuple) else (entry,))]
        sizes = [_extent(part, known) for part in parts]
        known[id(node)] = 1 + sum(size for size, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)
    return known[id(node)]


def or_of_hub(name: str) -> str:
    """The end of an error about a folder that does not exist: the form of names of the Hugging Face hub,
    if the name has nearly that form."""
    looks_so = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name, re.ASCII) and not Path(name).parent.exists()
    return f"; of the Hugging Face hub with its revision, such as {name}@main" if looks_so else ""


def check_regular(path: Path, where: str) -> None:
    """Raises ConfigError, which begins with `where`, if `path` is a pipe, socket or device: reading one may never
    end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(f"{where}: {path} is a pipe, socket or device; it should be a regular file")


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: the file is missing, a pipe or device, not YAML, too large or nested too deeply, a key is
            given twice in one mapping, or it does not hold a mapping.
    """
    try:
        check_regular(Path(path), "configuration")
        # A SafeLoader: it makes plain values and nothing else.
        if (size := Path(path).stat().st_size) > MOST_BYTES:
            raise _RefusedError(f"holds {size / MIB:.1f} MiB, where {MOST_BYTES // MIB} are the most")
        loaded = _values(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except _TwiceError as error:
        raise ConfigError(f"{path}, {error}") from None
    except _RefusedError as error:
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: {_TOO_DEEP}") from None
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark, " ".join(filter(None, [error.context, error.problem]))
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        tab = "; YAML is indented by blanks" if "'\\t'" in problem else ""
        raise ConfigError(f"{path}: not valid YAML: {place}{problem}{tab}") from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a date that does not exist
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: should hold a mapping at the top level, got {type(loaded).__name__}")
    return loaded


def _model_folder(value: str) -> str:
    """A model path has to exist where the service runs, with a config.json in it."""
    folder = Path(value)
    if not folder.is_dir():
        raise ValueError(f"no such folder on this machine (looked for {folder.resolve()})" + or_of_hub(value))
    if not (folder / "config.json").is_file():
        raise ValueError("the folder holds no config.json, so it is not a Hugging Face model")
    return value


ModelPath = Annotated[str, AfterValidator(_model_folder)]
"""Path of a Hugging Face model folder that exists on the machine that parses it."""

LAST_PORT = 65535
"""The largest TCP port."""
PortNumber = Annotated[int, Field(ge=1, le=LAST_PORT)]


def matching(pattern: str, form: str) -> AfterValidator:
    """Refuses text that does not match `pattern` as a whole; the error names the `form` in words."""

    def check(value: str) -> str:
        if re.fullmatch(pattern, value) is None:
            raise ValueError(f"should be {form}")
        return value

    return AfterValidator(check)


KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
IDLE_THREADS_SLEEP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
"""Environment of a process, set before it loads torch, whose threads do not spin while they wait for the next
operation: on the cores of a machine that is busy they would make everything several times slower."""
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""A number from which numpy and torch draw others."""
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0)]
"""A span of time, greater than zero."""
