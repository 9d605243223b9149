"""GPUs, links and networks in numbers, and a machine put together from their names."""

import dataclasses
import re
import shutil
import subprocess
from typing import Literal

from finetune.errors import FinetuneError, did_you_mean

SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
SMI_SECONDS = 60
"""How long it may take: without the driver's persistence mode it wakes one GPU after another."""

GIGA = 1e9
Bound = Literal["compute", "launches", "communication", "offload"]
"""What a step waits for most."""


@dataclasses.dataclass(frozen=True)
class GPU:
    """One accelerator. Rates are per second and per direction."""

    name: str
    memory: float
    """Bytes that the driver reports."""
    flops: float
    """Dense 16-bit matrix products."""
    bandwidth: float
    """Bytes of its own memory."""
    nvlink: float = 0.0
    """Bytes to the other GPUs of a node, per direction; 0 where there is no such link."""
    pcie: float = 32 * GIGA
    """Bytes to the host, per direction."""
    bf16: bool = True
    mfu: float = 0.40
    """Share of `flops` that training reaches: an assumption, said on the page."""
    single: float = 0.25
    """Share of `flops` that fp32 products have: PyTorch leaves TF32 off. Of a GPU described by
    numbers, between the 1/16 of an A100 and the 1/2 of a consumer's card."""
    context: float = 0.5e9
    """Bytes of a CUDA context with cuBLAS workspaces, bitsandbytes and Triton modules."""
    pairs: bool = False
    """Whether NVLink is a bridge that joins two cards and no more."""
    note: str = ""
    """What to know about the name."""

    @property
    def half(self) -> float:
        """Share of `flops` that bf16 products have: without units for it they run in fp32."""
        return 1.0 if self.bf16 else self.single


# Vendors' data sheets: dense rates (half of those "with sparsity"), NVLink halved to one direction.
# Memory is what the driver reports where that is known: an "80 GB" A100 or H100 shows 79.15 GiB
# (85.0e9 bytes), a 24 GB card 24 GiB less ECC or driver share. A T4's context: fitcheck.
# MFU: 0.40 H100, 0.45 A100, 0.5 4090 are assumptions within what is published (torchtitan Llama-3.1
# 8B FSDP on H100 0.33 to 0.40; Megatron on A100 0.41 to 0.56); 0.40 elsewhere.
# `single` is fp32 without TF32 over dense 16 bits; a T4 and a V100 compute bf16 at that rate too
# (pytorch/pytorch#148322), since their tensor cores know fp16 only.
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

# Accelerators that PyTorch reaches by backends of their own, and Apple's: nothing here runs on one.
_ELSEWHERE = {
    r"gaudi\d*|hpu|hl-\d+.*": "Intel Gaudi",
    r"tpu.*|v[2-6][ep]?-\d+": "a TPU",
    r"(apple-?)?m[1-9](-?(pro|max|ultra))?|mps": "Apple silicon",
    r"(aws-)?(trainium|trn|inferentia|inf)\d*.*": "AWS Trainium or Inferentia",
    r"(intel-)?(arc|xpu|(data-center-)?max-\d+|ponte-vecchio).*": "an Intel GPU",
    r"(huawei-)?(ascend|npu).*": "Huawei Ascend",
}

# Bytes per second and direction between the GPUs of a node. Peak rates of the standards.
LINKS: dict[str, float] = {
    "pcie3": 16e9, "pcie4": 32e9, "pcie5": 64e9,
    "nvlink2": 150e9, "nvlink3": 300e9, "nvlink4": 450e9, "nvlink5": 900e9,
}  # fmt: skip
# Bytes per second of one network port: its line rate. 400 Gb/s InfiniBand is 50 GB/s. EFA is named
# by what a node of eight GPUs has in all, 400 Gb/s (p4d) or 3200 (p5): an eighth of it for each.
# Others are a port of each GPU, as HGX machines have, unless `/node` says that a node shares one.
NETWORKS: dict[str, float] = {
    "ib100": 12.5e9, "ib200": 25e9, "ib400": 50e9, "ib800": 100e9, "1gbe": 0.125e9,
    "10gbe": 1.25e9, "25gbe": 3.125e9, "40gbe": 5e9, "50gbe": 6.25e9, "100gbe": 12.5e9,
    "200gbe": 25e9, "400gbe": 50e9, "800gbe": 100e9, "efa400": 6.25e9, "efa3200": 50e9,
}  # fmt: skip
# Words of a GPU's full name that tell it from no other here.
_VENDORS = {"nvidia", "amd", "instinct", "tesla", "geforce", "gpu"}
_FORMS = re.compile(r"(sxm|hbm)\d*e?")
# Share of a link's rate that collectives reach: NCCL's bus bandwidth on 8 x H100 NVLink is about
# 0.8 of 450 GB/s for large messages (nccl-tests); PCIe and networks reach about the same.
EFFICIENCY = 0.8
# NCCL's buffers and channels: 0.3 GB within a node, up to 1 GB over several.
NCCL, NCCL_NODES = 0.3e9, 1.0e9
# Share of a GPU's free memory that tensors may take; the rest is lost between blocks.
RESERVE = 0.95


@dataclasses.dataclass(frozen=True)
class Machine:
    """GPUs in nodes, and what joins them."""

    gpu: GPU
    count: int = 1
    nodes: int = 1
    link: float = 0.0
    """Bytes per second and direction between two GPUs of a node."""
    network: float = 0.0
    """Bytes per second that one GPU has to other nodes."""
    host_memory: float | None = None
    """Bytes per node, where it is known."""
    price: float | None = None
    """Per GPU and hour, in any currency."""
    fast: bool = False
    """Whether the GPUs of a node are joined by NVLink or its like."""
    taken: float = 0.0
    """Bytes of a GPU that other processes of the run have: reward models."""

    @property
    def per_node(self) -> int:
        return self.count // self.nodes

    @property
    def outside(self) -> float:
        """Bytes of a process outside PyTorch's allocator: its context, and NCCL's buffers."""
        return self.gpu.context + (NCCL if self.nodes == 1 else NCCL_NODES) * (self.count > 1)

    @property
    def usable(self) -> float:
        """Bytes that tensors may take: less what others have, and a reserve for the allocator."""
        return (self.gpu.memory - self.outside - self.taken) * RESERVE


def _key(name: str) -> str:
    """A GPU's name as it is looked up: `NVIDIA A100-SXM4-80GB` is `a100-80`."""
    words = re.split(r"[\s_-]+", name.strip().lower())
    words = [re.sub(r"^(\d+)gb$", r"\1", word) for word in words if word not in _VENDORS]
    words = [word for word in words if not _FORMS.fullmatch(word)]
    words.sort(key=lambda word: word == "pcie")
    return re.sub(r"^rtx-", "rtx", "-".join(words))


def _named(name: str) -> GPU | None:
    """The row of a name, with or without the memory that the row has."""
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
        FinetuneError: it is not known; says which are, and how to give one's numbers.
    """
    found = _named(name)
    if found is not None:
        return found
    for pattern, what in _ELSEWHERE.items():
        if re.fullmatch(pattern, _key(name)):
            raise FinetuneError(
                f"--gpu {name}: {what} does not run this toolkit, which trains on GPUs of CUDA and "
                "ROCm and on CPUs; name one of those, such as A100-80 or MI300X"
            )
    raise FinetuneError(
        f"--gpu {name}: unknown{did_you_mean(name, GPUS)}; known are {', '.join(GPUS)}; describe "
        "another by --gpu-memory 48 --tflops 362 --bandwidth 864"
    )


def _link(word: str) -> str:
    """A link as the table spells it: `PCIe 4.0 x16` is `pcie4`."""
    key = re.sub(r"[\s_-]", "", word.lower())
    key = re.sub(r"^(pcie)(?:gen)?(\d)(?:\.0)?(?:x16)?$", r"\1\2", key)
    return "nvlink" if key in ("nvswitch", "xgmi", "infinityfabric") else key


def _network(word: str) -> str:
    """A network as the table spells it: `100 GbE` and `eth100` are `100gbe`."""
    key = re.sub(r"[\s_-]", "", word.lower()).replace("infiniband", "ib")
    speeds = {"edr": "100", "hdr": "200", "ndr": "400", "xdr": "800"}
    key = re.sub(r"^(?:ib)?(edr|hdr|ndr|xdr)$", lambda found: f"ib{speeds[found[1]]}", key)
    key = re.sub(r"^(?:eth|ethernet|roce|rocev2)(\d+)$", r"\1gbe", key)
    return re.sub(r"^(\d+)(?:g|gb|gbps|gbit|gige)$", r"\1gbe", key)


def _port(word: str) -> tuple[str, bool]:
    """A network as the table spells it, and whether the GPUs of a node share one port of it."""
    name, _, holder = word.partition("/")
    return _network(name), holder.strip().lower() == "node"


def unknown(link: str | None, network: str | None) -> list[str]:
    """A problem for each of the words that names no link or network here."""
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
    """The GPUs of this machine, as NVIDIA's driver names them; empty where there is no driver.

    Raises:
        FinetuneError: a GPU is not in the table, or has no memory of its own.
    """
    found: list[GPU] = []
    for name, reported in listed():
        if reported is None:
            raise FinetuneError(
                f"this machine's {name} tells no memory of its own; describe it by --gpu-memory "
                "... --tflops ... --bandwidth ..."
            )
        found.append(of_driver(name, reported))
    return found


def listed() -> list[tuple[str, float | None]]:
    """Names and bytes of this machine's GPUs, as NVIDIA's driver tells them; empty without it.

    One that shares the host's memory (GB10, Thor) tells `[N/A]`: None.
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


# Bytes per second that gloo moves between processes of one machine: an assumption.
LOOPBACK = 1e9


# Share of the measured rate of square products that a step's own reach on a CPU, and bytes a second
# that its cheap operations move: both fit four steps of a Llama of 33.6 million parameters to 15 %
# (`benchmarks/results/memory.md`, `single`).
CPU_SHARE = 0.8
CPU_BANDWIDTH = 8e9


def processor(flops: float, processes: int, memory: float) -> Machine:
    """This machine's CPU, which every process has its cores of.

    Args:
        flops: measured rate of one process, in the type that it computes in.
        memory: bytes of the whole machine.
    """
    core = GPU(
        "CPU", memory / processes, flops, CPU_BANDWIDTH, pcie=LOOPBACK, mfu=CPU_SHARE, single=1.0
    )
    return Machine(core, processes, link=LOOPBACK)


def of_driver(name: str, reported: float) -> GPU:
    """A GPU of a driver's name, `NVIDIA A100-SXM4-80GB` or so, with the bytes that it reports.

    Raises:
        FinetuneError: it is not in the table.
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
    """A machine from the words that describe it.

    Args:
        link: between GPUs of a node; `nvlink` is that of the GPU. By default the GPU's best, PCIe
            where a node has more GPUs than a bridge joins.
        network: between nodes; a port of each GPU, or of a node (`10gbe/node`), which share it.
        host_memory: bytes per node.

    Raises:
        FinetuneError: with every word that is not known or does not fit.
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
    if problems:
        raise FinetuneError(*problems)
    port, shared = _port(network or "ib400")
    divided = shared and not port.startswith("efa")
    outside = NETWORKS[port] / (count // nodes if divided else 1)
    return Machine(
        chosen, count, nodes, inside, outside if nodes > 1 else 0.0, host_memory, price, fast
    )
