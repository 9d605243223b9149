"""Data of GPUs, links and networks, and machines composed of them by name."""

import dataclasses
import re
import shutil
import subprocess
from typing import Literal

from finetune.errors import FinetuneError, did_you_mean, refuse

SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
SMI_SECONDS = 60
"""Timeout in seconds: without persistence mode, the driver wakes one GPU after another."""

GIGA = 1e9
Bound = Literal["compute", "launches", "communication", "offload"]
"""What limits the speed of a step."""


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
    pcie: float = 32 * GIGA
    """Bytes/s to the host, per direction."""
    bf16: bool = True
    mfu: float = 0.40
    """Fraction of `flops` reached in training: an assumption, as stated in the output."""
    single: float = 0.25
    """Fraction of `flops` reached by fp32 products, as PyTorch does not enable TF32. The default,
    for a GPU described by numbers, is between 1/16 (A100) and 1/2 (consumer cards)."""
    context: float = 0.5e9
    """Bytes of a CUDA context with cuBLAS workspaces, bitsandbytes and Triton modules."""
    pairs: bool = False
    """Whether NVLink is a bridge that connects only two cards."""
    note: str = ""
    """A note on the name, for the output."""

    @property
    def half(self) -> float:
        """Fraction of `flops` reached by bf16 products, which run in fp32 without bf16 units."""
        return 1.0 if self.bf16 else self.single


# From vendors' data sheets: dense rates (half of those "with sparsity"), NVLink per direction.
# Memory is what the driver reports if that is known: an "80 GB" A100 or H100 shows 79.15 GiB
# (85.0e9 bytes), a 24 GB card 24 GiB minus ECC or the driver's share. Context of a T4: fitcheck.
# MFU: 0.40 H100, 0.45 A100, 0.5 4090 are assumptions within published values (torchtitan Llama-3.1
# 8B FSDP on H100 0.33 to 0.40; Megatron on A100 0.41 to 0.56); 0.40 for others.
# `single` is fp32 without TF32 relative to dense 16 bits; T4 and V100 compute bf16 at that rate too
# (pytorch/pytorch#148322), since their tensor cores support only fp16.
_DIES = "an MI250X is two devices of 64 GiB each, and a process drives one: --gpus counts devices"
_ROWS: tuple[GPU, ...] = (
    GPU("A100-40", 42.3e9, 312e12, 1555e9, 300e9, 32e9, mfu=0.45, single=19.5 / 312),
    GPU("A100-80", 85.0e9, 312e12, 2039e9, 300e9, 32e9, mfu=0.45, single=19.5 / 312),
    GPU("A100-80-PCIe", 85.0e9, 312e12, 1935e9, 0, 32e9, mfu=0.45, single=19.5 / 312),
    GPU("A100-40-PCIe", 42.3e9, 312e12, 1555e9, 0, 32e9, mfu=0.45, single=19.5 / 312),
    GPU("H100-80", 85.0e9, 989e12, 3350e9, 450e9, 64e9, single=67 / 989),
    GPU("H100-80-PCIe", 85.0e9, 756e12, 2000e9, 0, 64e9, single=51 / 756),
    GPU("H100-96", 102.0e9, 989e12, 3350e9, 450e9, 64e9, single=67 / 989),
    GPU("H200", 150.7e9, 989e12, 4800e9, 450e9, 64e9, single=67 / 989),
    GPU("B200", 192.0e9, 2250e12, 8000e9, 900e9, 64e9, single=80 / 2250),
    GPU("MI250X", 68.7e9, 191.5e12, 1638e9, 200e9, 32e9, single=47.9 / 191.5, note=_DIES),
    GPU("MI300X", 206.1e9, 1307e12, 5300e9, 448e9, 64e9, single=163.4 / 1307),
    GPU("L4", 24.1e9, 121e12, 300e9, 0, 32e9, single=30.3 / 121),
    GPU("L40S", 48.3e9, 362e12, 864e9, 0, 32e9, single=91.6 / 362),
    GPU("A10G", 24.1e9, 70e12, 600e9, 0, 32e9, single=31.5 / 70),
    GPU("A6000", 51.0e9, 155e12, 768e9, 56e9, 32e9, single=38.7 / 155, pairs=True),
    GPU("RTX3090", 25.4e9, 71e12, 936e9, 56e9, 32e9, single=35.6 / 71, pairs=True),
    GPU("RTX4090", 25.4e9, 165e12, 1008e9, 0, 32e9, mfu=0.5, single=82.6 / 165),
    GPU("RTX5090", 34.2e9, 209e12, 1792e9, 0, 64e9, mfu=0.5, single=104.8 / 209),
    GPU("T4", 15.8e9, 65e12, 320e9, 0, 16e9, bf16=False, single=8.1 / 65, context=0.14e9),
    GPU("V100", 34.1e9, 125e12, 900e9, 150e9, 16e9, bf16=False, single=15.7 / 125),
    GPU("V100-16", 16.9e9, 125e12, 900e9, 150e9, 16e9, bf16=False, single=15.7 / 125),
)
GPUS: dict[str, GPU] = {gpu.name: gpu for gpu in _ROWS}
ALIASES = {
    "a100": "A100-80", "a100-sxm": "A100-80", "h100": "H100-80", "h100-sxm": "H100-80",
    "a100-pcie": "A100-80-PCIe", "h100-pcie": "H100-80-PCIe", "4090": "RTX4090",
    "3090": "RTX3090", "5090": "RTX5090", "rtxa6000": "A6000", "a10": "A10G", "v100-32": "V100",
    "a100-80gb": "A100-80", "a100-40gb": "A100-40", "h100-80gb": "H100-80",
}  # fmt: skip

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
_VENDORS = {"nvidia", "amd", "instinct", "tesla", "geforce", "gpu"}
_FORMS = re.compile(r"(sxm|hbm)\d*e?")
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


def _key(name: str) -> str:
    """The lookup key of a GPU's name: `NVIDIA A100-SXM4-80GB` becomes `a100-80`."""
    words = re.split(r"[\s_-]+", name.strip().lower())
    words = [re.sub(r"^(\d+)gb$", r"\1", word) for word in words if word not in _VENDORS]
    words = [word for word in words if not _FORMS.fullmatch(word)]
    words.sort(key=lambda word: word == "pcie")
    return re.sub(r"^rtx-", "rtx", "-".join(words))


def _named(name: str) -> GPU | None:
    """The GPU with a name, which may include its memory."""
    known = {known.lower(): known for known in GPUS} | ALIASES
    key = _key(name)
    if key in known:
        return GPUS[known[key]]
    base, _, size = key.rpartition("-")
    if base not in known or not size.isdigit():
        return None
    row = GPUS[known[base]]
    near = min(abs(int(size) * unit - row.memory) for unit in (1e9, 2**30))
    return row if near < 0.07 * row.memory else None


def gpu(name: str) -> GPU:
    """A GPU by name.

    Raises:
        FinetuneError: the name is unknown; lists known names and how to describe another GPU.
    """
    if (found := _named(name)) is not None:
        return found
    raise FinetuneError(
        f"--gpu {name}: unknown{did_you_mean(name, GPUS)}; known are {', '.join(GPUS)}; describe "
        "another by --gpu-memory 48 --tflops 362 --bandwidth 864"
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
        FinetuneError: a GPU is not in the table, or has no dedicated memory.
    """
    found: list[GPU] = []
    for name, reported in listed():
        if reported is None:
            raise FinetuneError(
                f"this machine's {name} reports no dedicated memory; describe it by --gpu-memory "
                "... --tflops ... --bandwidth ..."
            )
        found.append(of_driver(name, reported))
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
        "CPU", memory / processes, flops, CPU_BANDWIDTH, pcie=LOOPBACK, mfu=CPU_SHARE, single=1.0
    )
    return Machine(core, processes, link=LOOPBACK)


def of_driver(name: str, reported: float) -> GPU:
    """A GPU by the driver's name, such as `NVIDIA A100-SXM4-80GB`, with the reported bytes.

    Raises:
        FinetuneError: the GPU is not in the table.
    """
    return dataclasses.replace(_row(name, reported), memory=reported)


def _row(name: str, reported: float) -> GPU:
    exact = _named(name)
    if exact is not None:
        return exact
    words = set(re.split(r"[\s\-_]+", name.lower().replace("geforce", "").replace("rtx ", "rtx")))
    pcie = "pcie" in words
    near = [
        row for row in GPUS.values()
        if row.name.lower().split("-")[0] in words and row.name.endswith("-PCIe") == pcie
    ]  # fmt: skip
    if not near:
        raise FinetuneError(
            f"this machine's {name.strip()} is not in the table; describe it by --gpu-memory "
            f"{reported / 1e9:.0f} --tflops ... --bandwidth ..."
        )
    return min(near, key=lambda row: abs(row.memory - reported))


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
    crowded = chosen.pairs and count // max(nodes, 1) > 2
    fast = chosen.nvlink > 0 and not crowded
    inside = max(chosen.nvlink, chosen.pcie) if fast else chosen.pcie
    if link is not None:
        key = _link(link)
        if crowded and key.startswith("nvlink"):
            problems.append(
                f"--link {link}: a bridge joins two {chosen.name}, and a node has "
                f"{count // max(nodes, 1)}; use pcie4 or pcie5"
            )
        rates = LINKS | {"nvlink": chosen.nvlink, "pcie": chosen.pcie}
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
