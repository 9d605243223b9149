"""Data of GPUs, links and networks, and machines composed of them by name."""

import dataclasses
import importlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

from finetune.errors import FinetuneError, did_you_mean, refuse

SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
SMI_SECONDS = 60
"""Timeout in seconds: without persistence mode, the driver wakes one GPU after another."""

Bound = Literal["compute", "launches", "communication", "offload", "sampling"]
"""What limits the speed of a step."""
LAUNCH, LAUNCH_CPU = 20e-6, 15e-6
"""Seconds on the host to launch an operation as `operations` counts them. On a GPU: 24 and 32
layers took 18 and 24 ms to decode a token on an A100, and 0.12 and 0.15 s to train 256 tokens
(QwenLM/Qwen, README)."""


@dataclasses.dataclass(frozen=True)
class GPU:
    """One accelerator. Rates are per second and per direction."""

    name: str
    memory: float
    """Bytes of memory reported by the driver."""
    flops: float
    """FLOP/s of dense 16-bit matrix products."""
    bandwidth: float
    """Bytes/s of its memory."""
    nvlink: float = 0.0
    """Bytes/s to the other GPUs of a node, per direction; 0 without NVLink."""
    pcie: float = 32e9
    """Bytes/s to the host, per direction."""
    bf16: bool = True
    reached: float = 0.7
    """Fraction of `flops` that large products reach: an assumption, as stated in the output."""
    single: float = 0.25
    """Fraction of `flops` reached by fp32 products, as PyTorch does not enable TF32. The default,
    for a GPU described by numbers, is between 1/16 (A100) and 1/2 (consumer cards)."""
    context: float = 0.5e9
    """Bytes of a CUDA context with cuBLAS workspaces, bitsandbytes and Triton modules."""
    pairs: bool = False
    """Whether NVLink is a bridge that connects only two cards."""
    mesh: bool = False
    """Whether `nvlink` is that of seven links, one to each other card."""
    peers: bool = True
    """Whether cards copy to each other without the host's memory in between."""
    launch: float = LAUNCH
    """Seconds on the host to launch an operation."""
    streams: float = 0.0
    """Bytes/s at which weights are read; that of its memory if 0."""
    note: str = ""
    """A note on the name, for the output."""

    @property
    def half(self) -> float:
        """Fraction of `flops` reached by bf16 products, which run in fp32 without bf16 units."""
        return 1.0 if self.bf16 else self.single

    def attained(self, width: int, fp16: bool) -> float:
        """FLOP/s that products of elements with `width` bytes are assumed to reach."""
        rate = self.single if width == 4 else 1.0 if fp16 else self.half
        return self.flops * self.reached * rate


def _read(line: str) -> GPU:
    """A row of `gpus.txt`, which states its columns."""
    name, memory, half, single, bandwidth, nvlink, pcie, reached, *words = line.split()
    note = ""
    if "die" in words:
        note = (
            f"an {name} is two devices of 64 GiB each, and a process drives one: --gpus counts "
            "devices"
        )
    if "shared" in words:
        note = f"{name} shares its memory with the host"
    return GPU(
        name, float(memory) * 1e9, float(half) * 1e12, float(bandwidth) * 1e9, float(nvlink) * 1e9,
        float(pcie) * 1e9, "fp16" not in words, float(reached), float(single) / float(half),
        0.14e9 if name == "T4" else 0.5e9,  # measured on a T4: fitcheck
        "pair" in words, "mesh" in words, "host" not in words, note=note,
    )  # fmt: skip


_TABLE = Path(__file__).with_name("gpus.txt").read_text(encoding="utf-8").splitlines()
GPUS: dict[str, GPU] = {
    gpu.name: gpu for gpu in (_read(line) for line in _TABLE if line and line[0] != "#")
}
ALIASES = {
    "a100": "A100-80", "h100": "H100-80", "a100pcie": "A100-80-PCIe", "h100pcie": "H100-80-PCIe",
    "h100-94": "H100-NVL", "a800": "A800-80", "a800pcie": "A800-80-PCIe", "gh200": "GH200-96",
    "gh200-480": "GH200-96",
}  # fmt: skip
"""Rows for names without a size, and for sizes that are not those of the card's memory."""

# Bytes per second and direction between the GPUs of a node: peak rates of the standards.
LINKS: dict[str, float] = {
    "pcie3": 16e9, "pcie4": 32e9, "pcie5": 64e9,
    "nvlink2": 150e9, "nvlink3": 300e9, "nvlink4": 450e9, "nvlink5": 900e9,
}  # fmt: skip
# Line rate of one network port in bytes per second: 400 Gb/s InfiniBand is 50 GB/s. EFA is named
# after the total of a node with eight GPUs, 400 Gb/s (p4d) or 3200 (p5): one eighth for each GPU.
# Others have one port per GPU, as HGX machines do, unless `/node` states that a node shares one.
NETWORKS: dict[str, float] = {
    "ib100": 12.5e9, "ib200": 25e9, "ib400": 50e9, "ib800": 100e9, "1gbe": 0.125e9,
    "10gbe": 1.25e9, "25gbe": 3.125e9, "40gbe": 5e9, "50gbe": 6.25e9, "100gbe": 12.5e9,
    "200gbe": 25e9, "400gbe": 50e9, "800gbe": 100e9, "efa400": 6.25e9, "efa3200": 50e9,
}  # fmt: skip
# Words of a GPU's full name that do not distinguish it from others in the table.
_SAME = {
    "nvidia", "amd", "instinct", "tesla", "geforce", "radeon", "quadro", "gpu", "graphics", "rtx",
    "blackwell", "generation", "workstation", "edition", "ac",
}  # fmt: skip
_FORMS = re.compile(r"(sxm|hbm|oam)\d*e?")
# Fraction of a link's rate that collectives reach: NCCL's bus bandwidth on 8 x H100 NVLink is about
# 0.8 of 450 GB/s for large messages (nccl-tests); PCIe and networks reach about the same.
EFFICIENCY = 0.8
# NCCL's buffers and channels: 0.3 GB within a node, up to 1 GB over several nodes.
NCCL, NCCL_NODES = 0.3e9, 1.0e9
# Fraction of a GPU's free memory available to tensors; the rest is lost to fragmentation.
RESERVE = 0.95


@dataclasses.dataclass(frozen=True)
class Machine:
    """GPUs in nodes, and the links between them."""

    gpu: GPU
    count: int = 1
    nodes: int = 1
    link: float = 0.0
    """Bytes per second and direction between two GPUs of a node."""
    network: float = 0.0
    """Bytes per second from one GPU to other nodes."""
    host_memory: float | None = None
    """Bytes per node; None if unknown."""
    price: float | None = None
    """Price per GPU and hour, in any currency."""
    fast: bool = False
    """Whether the GPUs of a node are connected by NVLink or a similar link."""
    taken: float = 0.0
    """Bytes of a GPU used by other processes of the run (reward models)."""

    @property
    def per_node(self) -> int:
        return self.count // self.nodes

    @property
    def outside(self) -> float:
        """Bytes of a process outside PyTorch's allocator: its context, and NCCL's buffers."""
        return self.gpu.context + (NCCL if self.nodes == 1 else NCCL_NODES) * (self.count > 1)

    @property
    def usable(self) -> float:
        """Bytes available to tensors, without those of other processes and a reserve."""
        return (self.gpu.memory - self.outside - self.taken) * RESERVE

    def ring(self, members: int) -> float:
        """Bytes per second of each process in a ring over several nodes.

        It enters and leaves a node once, over the ports of its `members` there.
        """
        return min(self.link, self.network * max(1, members))


def _key(name: str) -> tuple[str, int | None]:
    """A GPU's name without what is the same for others, and its gigabytes if it states them.

    `NVIDIA A100-SXM4-80GB` becomes `a100` and 80, `GeForce RTX 4070 Ti SUPER` `4070tisuper`.
    """
    size, kept = None, list[str]()
    for word in re.split(
        r"[\s_-]+", re.sub(r"(?<![a-z])(rtx|rx)(?=\d)", r"\1 ", name.lower().partition("/")[0])
    ):
        if found := re.fullmatch(r"(\d{1,3})(gb)?", word):
            size = int(found[1])
        elif word not in _SAME and not _FORMS.fullmatch(word):
            kept.append(word)
    form = [word for word in ("pcie",) if word in kept]
    return "".join([word for word in kept if word not in form] + form), size


_ROWS: dict[tuple[str, int | None], GPU] = {_key(name): gpu for name, gpu in GPUS.items()}


def _named(name: str, reported: float | None = None) -> GPU | None:
    """The row of a name, which may state its size; of several that nearest to `reported` bytes."""
    key, size = _key(name)
    alike = [gpu for (base, _), gpu in _ROWS.items() if base == key]
    if not alike:
        return None
    if reported is not None:
        return min(alike, key=lambda row: abs(row.memory - reported))
    if size is None and (key, None) not in _ROWS:
        return GPUS[ALIASES[key]] if key in ALIASES else min(alike, key=lambda row: row.memory)
    if f"{key}-{size}" in ALIASES:
        return GPUS[ALIASES[f"{key}-{size}"]]
    if (key, size) in _ROWS:
        return _ROWS[key, size]
    near = [
        row for row in alike
        if min(abs((size or 0) * unit - row.memory) for unit in (1e9, 2**30)) < 0.07 * row.memory
    ]  # fmt: skip
    return near[0] if near else None


def gpu(name: str) -> GPU:
    """A GPU by name.

    Raises:
        FinetuneError: the name is unknown; lists known names and how to describe another GPU.
    """
    if (found := _named(name)) is not None:
        return found
    raise FinetuneError(
        f"--gpu {name}: unknown{did_you_mean(name, GPUS)}; known are {', '.join(GPUS)}; describe "
        "another CUDA or ROCm GPU by --gpu-memory 48 --tflops 362 --bandwidth 864; training runs "
        "on these and on CPUs, on no other accelerator"
    )


def _link(word: str) -> str:
    """The lookup key of a link: `PCIe 4` becomes `pcie4`."""
    return re.sub(r"[\s_-]", "", word.lower())


def _port(word: str) -> tuple[str, bool]:
    """The lookup key of a network, and whether the GPUs of a node share one port."""
    name, _, holder = word.partition("/")
    return _link(name), holder.strip().lower() == "node"


def unknown(link: str | None, network: str | None) -> list[str]:
    """A problem for each unknown link or network."""
    problems: list[str] = []
    if link is not None and (key := _link(link)) not in {"nvlink", "pcie", *LINKS}:
        known = ", ".join(["nvlink", *LINKS])
        problems.append(f"--link {link}: unknown{did_you_mean(key, LINKS)}; known are {known}")
    if network is not None:
        port, shared = _port(network)
        if port not in NETWORKS or ("/" in network and not shared):
            near, known = did_you_mean(network, NETWORKS), ", ".join(NETWORKS)
            problems.append(
                f"--network {network}: unknown{near}; known are {known}, of each GPU; shared by a "
                "node: 10gbe/node"
            )
    return problems


def installed() -> list[GPU]:
    """The GPUs of this machine as reported by NVIDIA's driver; empty without a driver.

    Raises:
        FinetuneError: a GPU has no dedicated memory and is not in the table.
    """
    found: list[GPU] = []
    for name, reported in listed():
        row = _named(name) if reported is None else of_driver(name, reported)
        if row is None:
            raise FinetuneError(
                f"this machine's {name} reports no dedicated memory; describe it by --gpu-memory "
                "... --tflops ... --bandwidth ..."
            )
        found.append(row)
    return found


def listed() -> list[tuple[str, float | None]]:
    """Names and bytes of this machine's GPUs as reported by NVIDIA's driver; empty without it.

    The bytes are None for a GPU that shares the host's memory (GB10, Thor) and reports `[N/A]`.
    """
    if shutil.which(SMI[0]) is None:
        return []
    try:
        answer = subprocess.run(
            SMI, capture_output=True, text=True, timeout=SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if answer.returncode != 0:
        return []
    found: list[tuple[str, float | None]] = []
    for line in answer.stdout.strip().splitlines():
        name, _, memory = (word.strip() for word in line.rpartition(","))
        number = re.fullmatch(r"\d+(\.\d+)?", memory)
        found.append((name, float(memory) * 2**20 if number else None))
    return found


# Bytes per second between processes of one machine with gloo: an assumption.
LOOPBACK = 1e9


# Bytes per second at which a CPU reads weights, over all processes: an assumption for two channels.
CPU_STREAMS = 20e9
# Fraction of the measured rate of square products that the products of a step reach on a CPU, and
# bytes per second of its pointwise operations: fitted, within 15 %, to four steps of a Llama with
# 33.6 million parameters (`benchmarks/results/memory.md`, `single`).
CPU_SHARE = 0.8
CPU_BANDWIDTH = 8e9


def processor(flops: float, processes: int, memory: float) -> Machine:
    """The CPU of this machine, divided among the processes.

    Args:
        flops: measured FLOP/s of one process, in the compute data type.
        memory: bytes of the machine's memory.
    """
    core = GPU(
        "CPU", memory / processes, flops, CPU_BANDWIDTH, pcie=LOOPBACK, reached=CPU_SHARE,
        single=1.0, launch=LAUNCH_CPU, streams=CPU_STREAMS / processes,
    )  # fmt: skip
    return Machine(core, processes, link=LOOPBACK)


def of_driver(name: str, reported: float) -> GPU:
    """A GPU by the driver's name, such as `NVIDIA A100-SXM4-80GB`, with the reported bytes.

    A slice of a card (MIG) has its share of the card's rates. Rates of a GPU that is not in the
    table follow from its properties.
    """
    whole, _, part = name.partition(" MIG ")
    row = _named(name, reported)
    if row is None and part and (card := _named(whole)) is not None:
        share = int(part.partition("g")[0]) / SLICES.get(card.name, 7)
        narrow = card.bandwidth * min(1.0, reported / card.memory)
        row = dataclasses.replace(
            card, name=name.strip(), flops=card.flops * share, bandwidth=narrow, nvlink=0.0
        )
    return dataclasses.replace(row or _from_properties(name.strip(), reported), memory=reported)


SLICES = {"A30": 4}
"""Number of slices of a card if it is not 7."""
# Products of 16 bits that are added in fp32, in FLOP per clock and multiprocessor, by compute
# capability (NVIDIA's whitepapers of Volta to Blackwell); consumer cards from 7.5 on have 512.
_PER_CLOCK = {(7, 0): 1024, (8, 0): 2048, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192}


def _from_properties(name: str, reported: float) -> GPU:
    """A GPU that is not in the table, with the rates of its clocks, multiprocessors and memory.

    If PyTorch does not see it, the rates are those of the row with the nearest memory.
    """
    torch: Any = importlib.import_module("torch")  # takes seconds, and other plans need none
    if not torch.cuda.is_available() or torch.version.hip is not None:
        rows = (row for row in GPUS.values() if row.bf16)
        near = min(rows, key=lambda row: abs(row.memory - reported))
        guess = (
            f"{name} is not in the table: memory is the driver's, and times are a guess, those of "
            f"{near.name}, whose memory is nearest; describe it by --gpu-memory "
            f"{reported / 1e9:.0f} --tflops ... --bandwidth ..."
        )
        return dataclasses.replace(near, name=name, note=guess)
    card = torch.cuda.get_device_properties(0)
    kind, clocks = (card.major, card.minor), 1e3 * card.multi_processor_count * card.clock_rate
    half = clocks * _PER_CLOCK.get(kind, 512)
    wide = 128 if kind in ((7, 0), (7, 5), (8, 0)) else 256
    return GPU(
        name, reported, half, 2e3 * card.memory_clock_rate * card.memory_bus_width / 8,
        bf16=kind >= (8, 0), single=clocks * wide / half,
        note=f"{name} is not in the table: its rates are those of its clocks and memory bus",
    )  # fmt: skip


def machine(
    name: str | GPU,
    count: int = 1,
    nodes: int = 1,
    link: str | None = None,
    network: str | None = None,
    host_memory: float | None = None,
    price: float | None = None,
) -> Machine:
    """A machine with the given parts.

    Args:
        link: link between GPUs of a node; `nvlink` is that of the GPU. By default the GPU's
            fastest, or PCIe if a node has more GPUs than an NVLink bridge connects.
        network: network between nodes, with one port per GPU or per node (`10gbe/node`).
        host_memory: bytes per node.

    Raises:
        FinetuneError: contains every unknown or inconsistent argument.
    """
    problems = unknown(link, network)
    chosen = name if isinstance(name, GPU) else gpu(name)
    if count < 1 or nodes < 1 or count % max(nodes, 1):
        problems.append(f"--gpus {count}: does not divide over {nodes} nodes")
    here = count // max(nodes, 1)
    crowded = chosen.pairs and here > 2
    fast = chosen.nvlink > 0 and not crowded
    nvlink = chosen.nvlink * (min(1.0, max(1, here - 1) / 7) if chosen.mesh else 1.0)
    lane = chosen.pcie if chosen.peers else chosen.pcie / 2  # to the host's memory and from it
    inside = max(nvlink, lane) if fast else lane
    if link is not None:
        key = _link(link)
        if crowded and key.startswith("nvlink"):
            problems.append(
                f"--link {link}: a bridge joins two {chosen.name}, and a node has "
                f"{here}; use pcie4 or pcie5"
            )
        rates = LINKS | {"nvlink": nvlink, "pcie": lane}
        inside, fast = rates.get(key, inside), key.startswith("nvlink")
        if fast and not chosen.nvlink and (key == "nvlink" or chosen.name in GPUS):
            problems.append(f"--link {link}: {chosen.name} has none; use pcie4 or pcie5")
    refuse(problems)
    port, shared = _port(network or "ib400")
    divided = shared and not port.startswith("efa")
    outside = NETWORKS[port] / (count // nodes if divided else 1)
    return Machine(
        chosen, count, nodes, inside, outside if nodes > 1 else 0.0, host_memory, price, fast
    )
