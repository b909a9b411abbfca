"""The sums of memory of a deploy file, of one GPU and of one host: what does not fit, and what is needed."""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.deployment import host_memory, memory
from orchestrator.deployment.file import Deployment
from quartet.config.base import GIB
from quartet.models.size import ModelSize


@dataclass(frozen=True, slots=True)
class MemorySums:
    """The needs of all processes of a deploy file that says how much memory there is."""

    gpu: int | None
    """Bytes of each GPU; None: not said."""
    host: int | None
    """Bytes of each host; None: not said."""
    host_gpus: int | None
    """GPUs of each host; None: not said."""
    on_gpus: tuple[memory.Footprint, ...]
    on_hosts: tuple[host_memory.HostPart, ...]

    @classmethod
    def of(cls, deployment: Deployment, configs: Mapping[str, Any]) -> "MemorySums":
        """Adds up what a file needs. `configs` maps folders to transformers' configurations; if one is None, which is
        reported elsewhere, nothing is added up. ConfigError if one describes no language model."""
        run = deployment.orchestrator
        if None in configs.values():
            return cls(None, None, None, (), ())
        shape_at = functools.cache(lambda path: ModelSize.of(configs[path]))
        gpu, host = (None if gib is None else int(gib * GIB) for gib in (run.gpu_gib, run.host_gib))
        return cls(
            gpu,
            host,
            run.host_gpus,
            tuple(memory.footprints(deployment, gpu, shape_at)) if gpu else (),
            tuple(host_memory.host_parts(deployment, shape_at)) if host else (),
        )

    def problems(self) -> Iterator[str]:
        """Parts that may share a GPU or a host and do not fit, with the field that says how much there is."""
        if self.gpu is not None and (problem := memory.shortage(self.on_gpus, self.gpu)):
            yield f"orchestrator.gpu_gib: {problem}"
        if self.host is not None and (problem := host_memory.shortage(self.on_hosts, self.host, self.host_gpus)):
            yield f"orchestrator.host_gib: {problem}"

    def lines(self) -> Iterator[str]:
        """The needs of each part, and those of the fullest GPU and the fullest host, in GiB."""
        hosts = {part.name: part for part in sorted(self.on_hosts, key=lambda part: part.size)}
        gpus = {part.name: part for part in sorted(self.on_gpus, key=lambda part: part.size)}
        counts = Counter(part.name for part in self.on_hosts or self.on_gpus)
        for name, count in counts.items():
            needs = []
            if name in gpus:
                those = sum(part.name == name for part in self.on_gpus)
                some = f" ({those} of them)" if those < count else ""
                needs.append(f"{gpus[name].size / GIB:.1f} on a GPU{some}")
            if name in hosts:
                kinds = sorted(hosts[name].needs, key=lambda need: -need[1])
                named = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in kinds)
                needs.append(f"{hosts[name].size / GIB:.1f} on a host ({named})")
            largest = f", the largest of {count}" if count > 1 else ""
            yield f"memory of {name}{largest}: {' and '.join(needs)} GiB"
        if self.gpu is not None and self.on_gpus:
            phase, worst = memory.worst_phase(self.on_gpus)
            total = sum(part.during(phase) for part in worst)
            yield f"one GPU: {memory.summed(worst, phase)} = {total / GIB:.1f} of {self.gpu / GIB:.1f} GiB"
        if self.host is not None:
            parts = host_memory.most_on_one(self.on_hosts, self.host_gpus)
            total = host_memory.SYSTEM + sum(part.size for part in parts)
            yield f"one host: {host_memory.summed(parts)} = {total / GIB:.0f} of {self.host / GIB:.0f} GiB"
