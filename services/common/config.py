"""What every configuration in Quartet is made of: frozen, strict, and documented field by field."""

from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

Dtype = Literal["float32", "bfloat16"]


class ConfigError(ValueError):
    """A configuration that cannot work. Its message names each field and what would be right."""


class Config(BaseModel):
    """Base of every section: a typo is an error, a value never changes, each field has a docstring."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str) -> Self:
        """Validates `values`, which stand at `where` in the user's file.

        Raises:
            ConfigError: one line for each wrong field, as `where.field: what is wrong`.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: should be a mapping of fields to values, got {values!r}")
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError(explain(error, cls, where)) from None


def explain(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """Pydantic's findings as lines a user can act on."""
    lines = []
    for finding in error.errors():
        path = ".".join([where, *_written(model, finding["loc"])])
        if finding["type"] == "extra_forbidden":
            known = ", ".join(sorted(_fields_at(model, finding["loc"][:-1])))
            lines.append(f"{path}: no such field" + (f"; the fields here are {known}" if known else ""))
        elif finding["type"] == "missing":
            lines.append(f"{path}: required")
        else:
            message = finding["msg"].removeprefix("Value error, ")
            # What is wrong with a whole section needs no copy of the section.
            given = "" if isinstance(finding["input"], dict) else f", got {finding['input']!r}"
            lines.append(f"{path}: {message}{given}")
    return "\n".join(lines)


def _written(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """`path` as it stands in the file: pydantic also names the variant that a section's `kind` chose."""
    kinds = [model, *(_kind_at(model, path[:end]) for end in range(1, len(path)))]
    return [str(part) for part, kind in zip(path, kinds, strict=False) if _variant(kind, part) is None]


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> set[str]:
    """Names of the fields of the section at `path`, or none where it is no section."""
    kind = _kind_at(model, path)
    return set(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else set()


def _kind_at(kind: Any, path: tuple[int | str, ...]) -> Any:
    """The type of what stands at `path` below `kind`, or None where that is not known."""
    for part in path:
        if variant := _variant(kind, part):
            kind = variant
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields.get(str(part))
            kind = field.annotation if field else None
        else:
            kind = get_args(kind)[0] if get_origin(kind) is list else None
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
    return kind


def _variant(kind: Any, tag: int | str) -> type[BaseModel] | None:
    """The section of the union `kind` whose discriminator has the value `tag`."""
    sections = get_args(kind) if get_origin(kind) in (Union, UnionType) else ()
    for section in sections:
        fields = section.model_fields.values() if isinstance(section, type) and issubclass(section, BaseModel) else ()
        if any(tag in get_args(field.annotation) for field in fields):
            found: type[BaseModel] = section
            return found
    return None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: there is no such file, it is not YAML, or it does not hold a mapping.
    """
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: should hold a mapping at the top level, got {type(loaded).__name__}")
    return loaded


def _model_folder(value: str) -> str:
    """A model path has to exist where the service runs, with a config.json in it."""
    folder = Path(value)
    if not folder.is_dir():
        raise ValueError(f"no such folder on this machine (looked for {folder.resolve()})")
    if not (folder / "config.json").is_file():
        raise ValueError("the folder holds no config.json, so it is no Hugging Face model")
    return value


ModelPath = Annotated[str, AfterValidator(_model_folder)]
"""Path of a Hugging Face model folder that exists on the machine that parses it."""

Seconds = Annotated[float, Field(gt=0)]
"""A span of time, greater than zero."""
