"""Models and data sets of the Hugging Face hub, by ORG/NAME@REVISION, and the folders of data sets, by
ORG/NAME@REVISION/FOLDER: fetched once, and pinned by a lock beside the file that names them.

The lock holds the commit and the SHA-256 of each file. What it pins is compared in full at each start, and a
difference is an error. What is there is not asked for again, so that a pinned run needs no network. Only files that
nothing executes are fetched: weights in safetensors, JSON, texts of tokenizers; and for data JSON and Parquet.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

import yaml

from quartet.config.base import Config, ConfigError, matching, read_yaml
from quartet.folders import replace_file

Answer = TypeVar("Answer")
Kind = Literal["model", "dataset"]
_NAME = r"[A-Za-z0-9](?:[\w-]|\.(?!\.)){0,95}"
_PLAIN = r"[A-Za-z0-9](?:[\w-]|\.(?!\.)){0,199}"
ID = re.compile(
    rf"(?P<repository>{_NAME}/{_NAME})@(?P<revision>refs/(?:pr|convert)/{_PLAIN}|{_PLAIN})(?:/(?P<inside>{_PLAIN}(?:/{_PLAIN})*))?",
    re.ASCII,
)
"""The form of ORG/NAME@REVISION and of ORG/NAME@REVISION/FOLDER, as in the hub's own hf:// addresses: of revisions
only those of pull requests and conversions may hold a slash."""
_FILE = re.compile(r"[A-Za-z0-9_][\w.+-]*", re.ASCII)
"""The form of a file's and of a folder's name that is fetched."""
_MODEL_FILE = re.compile(r"[\w.-]+\.(?:safetensors|json|jinja)|merges\.txt|vocab\.txt|tokenizer\.model", re.ASCII)
"""Files of a model that are fetched: nothing that holds code or pickled objects."""
_DATA_FILE = re.compile(r"(?!dataset_infos\.json$)[\w.-]+\.(?:jsonl|json|parquet)", re.ASCII)

Sha256 = Annotated[str, matching(r"[0-9a-f]{64}", "64 hexadecimal digits")]
FileName = Annotated[
    str, matching(r"[A-Za-z0-9_][\w.+-]*(/[A-Za-z0-9_][\w.+-]*)*", "the name of a file in its repository")
]


class Pin(Config):
    """A model or data set as it was when it was first fetched."""

    kind: Kind
    """model or dataset."""
    commit: Annotated[str, matching(r"[0-9a-f]{40}", "40 hexadecimal digits")]
    """The commit that the revision stood for."""
    files: dict[FileName, Sha256]
    """Name of a file in the repository -> its SHA-256."""


class Lock(Config):
    """The lock beside a file of facts: mine.lock for mine.yaml."""

    pins: dict[str, Pin]
    """ORG/NAME@REVISION -> its pin."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository's files at a commit."""

    commit: str
    files: Mapping[str, str | None]
    """Name -> SHA-256 that the hub gives; None for small files, of which it gives another hash."""


class HuggingFace:
    """The Hugging Face hub, or the one that HF_ENDPOINT names, with huggingface_hub's own cache and progress bars."""

    def listing(self, repository: str, revision: str, kind: Kind) -> Listing:
        """The files of a repository. ConfigError if it cannot be listed."""
        from huggingface_hub import HfApi

        def ask() -> Listing:
            info: Any = HfApi().repo_info(
                repository, revision=revision, repo_type=kind, files_metadata=True, timeout=60
            )
            hashes = {each.rfilename: each.lfs.sha256 if each.lfs else None for each in info.siblings or []}
            return Listing(str(info.sha), hashes)

        return self._asked(ask, f"{repository}@{revision}")

    def fetch(self, repository: str, commit: str, kind: Kind, name: str) -> None:
        """Fetches one file. ConfigError if it cannot be fetched."""
        from huggingface_hub import hf_hub_download

        self._asked(
            lambda: hf_hub_download(repository, name, revision=commit, repo_type=kind),
            f"{repository}@{commit}: {name}",
        )

    def folder(self, repository: str, commit: str, kind: Kind) -> Path:
        """The folder that holds the files of a commit."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        name = repo_folder_name(repo_id=repository, repo_type=kind)
        return Path(constants.HF_HUB_CACHE) / name / "snapshots" / commit

    def _asked(self, ask: Callable[[], Answer], what: str) -> Answer:
        from huggingface_hub.errors import OfflineModeIsEnabled

        try:
            return ask()
        except OfflineModeIsEnabled:
            raise ConfigError(
                f"{what}: is not on this machine, and HF_HUB_OFFLINE forbids to fetch it; unset it for once"
            ) from None
        except Exception as error:  # of the hub, of the network below it, or of the disk
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ConfigError(f"{what}: cannot be fetched: {reason}") from None


@dataclass(slots=True)
class Pinned:
    """The models and data sets that a file names, and its lock."""

    lock: Path
    hub: HuggingFace = field(default_factory=HuggingFace)

    @classmethod
    def beside(cls, file: Path) -> "Pinned":
        """The lock of a file of facts, and Hugging Face's hub."""
        return cls(file.with_suffix(".lock"))

    def place(self, name: str, kind: Kind, where: str) -> str:
        """The folder of a model or data set that is named as the hub's are, by `folder`; any other name as it is."""
        return self.folder(name, kind, where) if "@" in name and not Path(name).exists() else name

    def folder(self, name: str, kind: Kind, where: str) -> str:
        """The folder of a model or data set on this machine, fetched if it is not there.

        Args:
            name: ORG/NAME@REVISION; of a data set of which several folders hold data ORG/NAME@REVISION/FOLDER.
            kind: model or dataset.
            where: the field that names it.

        Raises:
            ConfigError: it cannot be fetched, holds nothing that may be fetched, or is not what the lock pins.
        """
        match = ID.fullmatch(name)
        if match is None or (kind == "model" and match["inside"]):
            raise ConfigError(f"{where}: should be a folder or ORG/NAME@REVISION, got {name!r}")
        try:
            pins = self._pins()
            if (pin := pins.get(name)) is None:
                pin = self._pin(match["repository"], match["revision"], kind, match["inside"])
                self._write(pins | {name: pin})
            elif pin.kind != kind:
                raise ConfigError(f"{self.lock}: pins {name} as a {pin.kind}, which is to be a {kind}")
            root = self._checked(match["repository"], pin)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        return str(root / PurePosixPath(next(iter(pin.files))).parent)

    def _pins(self) -> dict[str, Pin]:
        if not self.lock.exists():
            return {}
        return dict(Lock.parse(read_yaml(self.lock), str(self.lock)).pins)

    def _write(self, pins: Mapping[str, Pin]) -> None:
        text = yaml.safe_dump({"pins": {key: pin.model_dump() for key, pin in sorted(pins.items())}}, sort_keys=False)
        head = "# Written by `quartet`: what each ORG/NAME@REVISION stood for. Keep it beside its file, in git too.\n"
        try:
            replace_file(self.lock, (head + text).encode())
        except OSError as error:
            raise ConfigError(f"{self.lock}: cannot be written: {error.strerror}") from None

    def _pin(self, repository: str, revision: str, kind: Kind, inside: str | None) -> Pin:
        """Fetches what the revision stands for now."""
        listing = self.hub.listing(repository, revision, kind)
        commit = listing.commit
        if not re.fullmatch(r"[0-9a-f]{40}", commit):
            raise ConfigError(f"{repository}@{revision}: the hub gives {commit!r} as its commit")
        if re.fullmatch(r"[0-9a-f]{40}", revision) and commit != revision:
            raise ConfigError(f"{repository}@{revision}: the hub gives another commit, {commit}")
        names = _of_model(listing.files) if kind == "model" else _of_data(listing.files, inside)
        if isinstance(names, str):
            raise ConfigError(f"{repository}@{revision}: {names}")
        for name in names:
            self.hub.fetch(repository, commit, kind, name)
        hashes = _hashes(self.hub.folder(repository, commit, kind), names)
        for name, digest in hashes.items():
            if (told := listing.files[name]) not in (None, digest):
                raise ConfigError(f"{repository}@{revision}: {name}: has SHA-256 {digest}, but the hub says {told}")
        return Pin(kind=kind, commit=commit, files=hashes)

    def _checked(self, repository: str, pin: Pin) -> Path:
        """The folder of what is pinned, after what is missing was fetched and all of it compared."""
        folder = self.hub.folder(repository, pin.commit, pin.kind)
        if not pin.files:
            raise ConfigError(f"{self.lock}: pins no file of {repository}")
        for name in pin.files:
            if not (folder / name).is_file():
                self.hub.fetch(repository, pin.commit, pin.kind, name)
        for name, digest in _hashes(folder, list(pin.files)).items():
            if digest != pin.files[name]:
                raise ConfigError(
                    f"{folder / name}: has SHA-256 {digest}, but {self.lock} pins {pin.files[name]}; remove the file "
                    "to fetch it again, or the pin to take what is there now"
                )
        return folder


def _of_model(files: Mapping[str, object]) -> list[str] | str:
    """The files of a model that are fetched; or the problem with them."""
    names = sorted(name for name in files if _MODEL_FILE.fullmatch(name))
    if not any(name.endswith(".safetensors") for name in names):
        return "holds no weights in safetensors, and others are not loaded, as they may hold code"
    return names if "config.json" in names else "holds no config.json, so it is not a model"


def _of_data(files: Mapping[str, object], inside: str | None) -> list[str] | str:
    """The files of a data set that are fetched; or the problem with them."""
    folders: dict[str, list[str]] = {}
    for name in sorted(files):
        *above, last = name.split("/")
        if _DATA_FILE.fullmatch(last) and all(_FILE.fullmatch(part) for part in above):
            folders.setdefault("/".join(above), []).append(name)
    found = ", ".join(folder or "." for folder in folders)
    if inside is not None:
        return folders.get(inside) or f"holds no data in the folder {inside}; folders with data are {found or 'none'}"
    if len(folders) > 1:
        return f"holds data in several folders; write one of them behind the revision, after a slash: {found}"
    return next(iter(folders.values()), "holds no .jsonl, .json or .parquet file")


def _hashes(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Name -> SHA-256 of the file; hashed side by side."""
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(lambda name: _sha256(folder / name), names), strict=True))


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
