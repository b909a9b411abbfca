"""What every configuration in Quartet is made of: frozen, strict, and documented field by field."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

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
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError(explain(error, cls, where)) from None


def explain(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """Pydantic's findings as lines a user can act on."""
    lines = []
    for finding in error.errors():
        path = ".".join([where, *(str(part) for part in finding["loc"])])
        if finding["type"] == "extra_forbidden":
            known = ", ".join(sorted(_fields_at(model, finding["loc"][:-1])))
            lines.append(f"{path}: no such field" + (f"; the fields here are {known}" if known else ""))
        elif finding["type"] == "missing":
            lines.append(f"{path}: required")
        else:
            lines.append(f"{path}: {finding['msg']}, got {finding['input']!r}")
    return "\n".join(lines)


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> set[str]:
    """Names of the fields of the section at `path`, or none where it is not a plain section."""
    for part in path:
        field = model.model_fields.get(str(part))
        kind = field.annotation if field else None
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return set()
        model = kind
    return set(model.model_fields)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: there is no such file, it is not YAML, or it does not hold a mapping.
    """
    try:
        loaded = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
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
