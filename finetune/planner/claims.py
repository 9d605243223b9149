"""Claims about memory and communication that circulate and are wrong, each with what is right."""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim, the words that it is known by, and its correction."""

    words: tuple[str, ...]
    """Regular expressions that all occur in it."""
    correction: str
    verdict: str = "wrong_or_misleading"


CLAIMS: tuple[Claim, ...] = (
    Claim(
        (r"zero-?3", r"64\s*x"),
        "ZeRO-3 divides states by N: 8x on 8 GPUs; 64x needs 64",
    ),
    Claim(
        (r"zero-?2", r"8\s*x"),
        "16/(2 + 14/N): 4.27x on 8 GPUs; 8x is the limit of many GPUs",
    ),
    Claim(
        (r"zero-?1", r"4\s*x"),
        "16/(4 + 12/N): 2.91x on 8 GPUs; 4x is the limit of many GPUs",
    ),
    Claim(
        (r"70b", r"420|140"),
        "AdamW keeps two moments: 560 GB all in bf16, 1129 GB in mixed precision (16 B/parameter)",
    ),
    Claim(
        (r"mixed precision", r"2\s*x|half|halves|50\s*%"),
        "model states stay at 16 B/parameter (up to 20 with fp32 gradients); activations halve",
    ),
    Claim(
        (r"all-?reduce", r"o\(\s*log|log\s*n"),
        "each rank sends 2S(N - 1)/N, about constant in N; only latency grows",
    ),
    Claim(
        (r"zero|fsdp", r"activation"),
        "sharding leaves activations whole; checkpointing and a smaller micro-batch reduce them",
    ),
    Claim(
        (r"fsdp", r"ddp", r"shard"),
        "DDP shards nothing; FSDP shards weights, gradients and optimizer state",
    ),
    Claim(
        (r"deepspeed", r"only", r"offload|cpu"),
        "FSDP offloads weights, gradients and optimizer together; the optimizer alone, and NVMe, "
        "need DeepSpeed",
    ),
    Claim(
        (r"zero-?2", r"all-?reduce"),
        "ZeRO-2 reduce-scatters gradients and all-gathers new weights: 2 x weights all the same",
    ),
    Claim(
        (r"lr|learning rate", r"linear"),
        "linear scaling was found for SGD; Adam takes the square root, and both need a warmup",
    ),
    Claim(
        (r"nvlink", r"900"),
        "900 GB/s counts both directions: 450 each way on an H100",
    ),
    Claim(
        (r"(gradient )?accumulation", r"zero-?[23]|fsdp", r"communicat|traffic"),
        "from ZeRO-2 on gradients are reduced every micro-batch, and sharded weights gathered anew",
    ),
    Claim(
        (r"fits?", r"weights|parameters"),
        "a model fits when weights, gradients, optimizer state and activations do: 16 B/parameter "
        "before activations",
    ),
    Claim(
        (r"checkpoint", r"essential|always|required"),
        "recomputation costs a third more compute: use it where memory asks for it",
    ),
    Claim(
        (r"deepspeed", r"100b|only way|required"),
        "FSDP shards as ZeRO-3 does at any size; DeepSpeed is for the optimizer's offload and NVMe",
    ),
    Claim(
        (r"lora", r"fsdp|zero-?3", r"less|reduces?|small", r"communicat|traffic"),
        "frozen weights are gathered all the same: 28 GB a step for 8B on 8 GPUs, against 0.15 "
        "for DDP",
    ),
    Claim(
        (r"checkpoint", r"34\s*sbh"),
        "34 sbh is what selective recomputation keeps; full recomputation keeps 2 sbh",
    ),
    Claim(
        (r"qlora|4-bit|nf4", r"optimizer|gradients"),
        "quantisation shrinks frozen weights only; adapters keep 16 B/parameter",
    ),
    Claim(
        (r"zero-?3|fsdp", r"same (communication|volume|traffic)"),
        "3 x weights per step instead of DDP's 2: half as much again",
    ),
    Claim(
        (r"reduce_dtype", r"bf16"),
        "gradients are reduced in fp32 here; bf16 halves the bytes and rounds the sum",
    ),
)


def judge(text: str) -> Claim | None:
    """The known claim that a sentence makes, or None."""
    lowered = text.lower()
    for claim in CLAIMS:
        if all(re.search(word, lowered) for word in claim.words):
            return claim
    return None
