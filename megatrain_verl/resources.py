"""What the engine needs of the host, against what the host has: checked before anything is allocated."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megatrain_verl.config import StreamingConfig
from megatrain_verl.streaming.chunked_adamw import chunk_size
from megatrain_verl.streaming.gradients import SLAB_ELEMENTS
from megatrain_verl.streaming.group.mailboxes import MAILBOX_BYTES
from megatrain_verl.streaming.host_adamw import usable_cores
from megatrain_verl.streaming.host_store import DTYPES, TRAINED, arena_dtypes, arena_elements, units_with_spares

GIB = 1 << 30


class Sizes(Protocol):
    """A model as `HostPlan` sees it: a `ModelPlan`, or `ModelSizes` from a config.json alone."""

    unit_sizes: tuple[int, ...]
    trained_sizes: tuple[int, ...]
    early_units: list[int]
    num_parameters: int


# What the process grows by, beyond the bytes of the plan, while it trains: allocator, queues, page tables.
MARGIN = 1.05
# File names of the limit and the usage, and the keys of page cache in memory.stat, for cgroup v2 and v1.
CGROUP_V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


@dataclass(frozen=True)
class HostPlan:
    """Bytes of host memory by kind.

    Those of `arena_dtypes`, `spare` (speculative AdamW) and `staging` (gradient slabs, AdamW's scratch, buffers for a
    reference from a file; with several ranks that of all, and the mailboxes through which gradients go where devices
    have no access to each other). `file_bytes` are those of that file.
    """

    bytes_by_kind: dict[str, int]
    parameters: int
    file_bytes: int = 0

    @classmethod
    def of(
        cls, model: Sizes, config: StreamingConfig, *, trainable: bool, reference: bool, ranks: int = 1
    ) -> "HostPlan":
        """The memory of an engine on `model`; `reference`: it keeps a reference policy beside the trained weights.

        `ranks` are the processes that share the arenas.

        Raises:
            ValueError: several ranks with a setting for one.
        """
        if config.expert_parts > 1 and ranks > 1:
            raise ValueError(f"expert_parts={config.expert_parts} works with one GPU, not with {ranks}; set it to 1")
        if config.reference_folder is not None and reference and ranks > 1:
            raise ValueError(f"reference_folder works with one GPU, not with {ranks}; set it to null")
        dtypes = arena_dtypes(config, trainable=trainable, reference=reference)
        units = list(zip(model.unit_sizes, model.trained_sizes, strict=True))
        sizes = {
            kind: dtype.itemsize * sum(arena_elements(kind, numel, trained) for numel, trained in units)
            for kind, dtype in dtypes.items()
        }
        if trainable:
            spares = units_with_spares(model.early_units, model.unit_sizes, model.trained_sizes, config)
            spared = sum(model.unit_sizes[index] for index in spares)
            if spared:
                sizes["spare"] = spared * sum(dtypes[kind].itemsize for kind in TRAINED if kind in dtypes)
            sizes["staging"] = 2 * 4 * chunk_size(config.cpu_threads or usable_cores())
            if dtypes["grad"] is torch.float32:  # only then can gradients be added on the host, through slabs
                slab = 4 * min(SLAB_ELEMENTS, max(model.trained_sizes))
                sizes["staging"] += config.num_grad_slabs * slab
            if ranks > 1:
                sizes["staging"] = ranks * (sizes["staging"] + MAILBOX_BYTES)
        in_file = [arena_elements("reference", *unit) for unit in units] if trainable and reference else []
        if config.reference_folder is None or not in_file:
            return cls(sizes, model.num_parameters)
        itemsize = DTYPES[config.dtype].itemsize
        sizes["staging"] += 2 * max(in_file) * itemsize
        return cls(sizes, model.num_parameters, sum(in_file) * itemsize)

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.bytes_by_kind.values())

    @property
    def bytes_per_parameter(self) -> float:
        """Host bytes per parameter of the model."""
        return self.total / self.parameters

    def table(self) -> str:
        """One line per kind, in GiB, and the total."""
        lines = [f"  {kind:<12}{nbytes / GIB:>10.2f} GiB" for kind, nbytes in self.bytes_by_kind.items()]
        total = f"  {'total':<12}{self.total / GIB:>10.2f} GiB  ({self.bytes_per_parameter:.1f} bytes/parameter)"
        return "\n".join([*lines, total])


def check_host_memory(plan: HostPlan, config: StreamingConfig) -> None:
    """Refuse an engine that does not fit into host memory.

    Raises:
        ValueError: the plan by kind, what is available and who says so, and what to lower.
    """
    if config.host_memory_gb is not None:
        available, source = int(config.host_memory_gb * GIB), "host_memory_gb"
    else:
        available, source = available_host_memory()
    needed = plan.total * MARGIN
    if needed <= available:
        return
    raise ValueError(
        f"{plan.parameters:,} parameters need {needed / GIB:.2f} GiB of host memory (the plan and 5%), "
        f"{available / GIB:.2f} GiB are available ({source}):\n{plan.table()}\nWhat helps:\n"
        + "\n".join(f"  - {remedy}" for remedy in _remedies(plan, config))
    )


def check_spill(config: StreamingConfig, plan: HostPlan, nbytes: int) -> None:
    """Refuse a step whose layer inputs fit neither on the device nor beside the arenas of `plan` in host memory.

    Raises:
        ValueError: what is missing and what to lower.
    """
    if config.host_memory_gb is not None:
        available, source = int(config.host_memory_gb * GIB - plan.total * MARGIN), "host_memory_gb less the plan"
    else:
        available, source = available_host_memory()
    if nbytes * MARGIN > available:
        fewer = f"checkpoint_interval={2 * config.checkpoint_interval} to keep half as many, "
        raise ValueError(
            f"the layer inputs of this step need {nbytes / GIB:.2f} GiB of host memory beyond the device's share, "
            f"{available / GIB:.2f} GiB are available ({source}): set wave_tokens to run the step in waves (its "
            f"gradients then take float32), {fewer if config.expert_parts == 1 else ''}or lower the tokens per step"
        )


def available_host_memory(
    meminfo: str = "/proc/meminfo", cgroup_root: str = "/sys/fs/cgroup", own_cgroup: str = "/proc/self/cgroup"
) -> tuple[int, str]:
    """(bytes, who says so): the least of MemAvailable and the room under each memory limit of this process's cgroups.

    Page cache that the kernel can drop does not count as used.
    """
    fields = dict(line.split(":") for line in Path(meminfo).read_text().splitlines())
    kib = int(fields["MemAvailable"].split()[0])
    return min([(kib * 1024, f"MemAvailable in {meminfo}"), *_cgroup_rooms(Path(cgroup_root), Path(own_cgroup))])


def check_shared_memory(nbytes: int, path: str = "/dev/shm") -> None:
    """Refuse to start where `path` cannot take the `nbytes` through which weights go to the rollout.

    Writing to a shared-memory file that has no room would kill the process (SIGBUS), without a message.

    Raises:
        ValueError: what is needed, what is free, and how to enlarge it.
    """
    if not os.path.isdir(path):
        raise ValueError(f"{path} does not exist; the weight transfer to the rollout needs shared memory there")
    usage = os.statvfs(path)
    free = usage.f_bavail * usage.f_frsize
    if nbytes > free:
        raise ValueError(
            f"the weight transfer to the rollout needs {nbytes / 2**20:.0f} MiB of shared memory, {path} has "
            f"{free / 2**20:.0f} MiB free: start the container with a larger one (docker run --shm-size=8g; in "
            "Kubernetes an emptyDir volume with medium: Memory), or remove what other programs left there"
        )


def _remedies(plan: HostPlan, config: StreamingConfig) -> Iterator[str]:
    sizes = plan.bytes_by_kind
    if "spare" in sizes:
        less = f"{sizes['spare'] / GIB:.2f} GiB less"
        yield f"speculative_adamw_gb=0, with which AdamW begins when the gradient norm is known: {less}"
    if "reference" in sizes:
        yield f"train without a KL term, hence without a reference policy: {sizes['reference'] / GIB:.2f} GiB less"
        if config.expert_parts == 1:
            yield (
                "reference_folder=<folder on a fast disk>, with one GPU: most of that, but every reference pass reads "
                f"{sizes['reference'] / GIB:.2f} GiB from the disk"
            )
    if config.dtype == "float32":
        yield "dtype=bfloat16, which keeps the same float32 master weights"
    elif config.host_grad_dtype == "float32" and "grad" in sizes:
        yield f"grad_dtype=auto without wave_tokens: {(sizes['grad'] / 2 + sizes['staging']) / GIB:.2f} GiB less"
    yield "a smaller model, or a host or container with more memory"
    if config.host_memory_gb is None:
        yield "on a virtual machine whose memory grows with use: host_memory_gb=<what it can really give>"


def _cgroup_rooms(root: Path, own_cgroup: Path) -> Iterator[tuple[int, str]]:
    """Room under every memory limit that applies to this process: its cgroup's and those of the groups above it."""
    if not own_cgroup.is_file():
        return
    for line in own_cgroup.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, names = root, CGROUP_V2
        elif "memory" in controllers.split(","):
            base, names = root / "memory", CGROUP_V1
        else:
            continue
        # In a container without its own cgroup namespace `group` is a path of the host, which does not exist here;
        # the container's group is then mounted at `base`.
        folder = base / group.strip("/")
        while folder.is_relative_to(base):
            yield from _cgroup_room(folder, *names)
            folder = folder.parent


def _cgroup_room(folder: Path, limit: str, usage: str, cache_keys: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    if not (folder / limit).is_file() or (folder / limit).read_text().strip() == "max":
        return
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    cache = sum(int(stat.get(key, 0)) for key in cache_keys)
    limit_bytes = int((folder / limit).read_text())
    used = int((folder / usage).read_text()) - cache
    yield limit_bytes - used, f"limit of {limit_bytes / GIB:.2f} GiB in {folder / limit}"


if __name__ == "__main__":
    from megatrain_verl.resources_report import main

    main()
