"""Claims about memory and communication that circulate and are wrong, with what is right instead."""

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
        "ZeRO-2 reduce-scatters gradients and all-gathers updated weights: 2 x weights all the same",
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
