"""Table of published shapes of well-known models, used if a config cannot be read.

Gated repositories require a login even for their `config.json`. The columns of a row are: name,
model type, hidden size, layers, heads, key-value heads, inner width, vocabulary size, and
differences from Llama with an untied head.
"""

import re
from typing import Any

_TABLE = """
llama-7b            llama     4096  32  32  32  11008  32000
llama-13b           llama     5120  40  40  40  13824  32000
llama-30b           llama     6656  60  52  52  17920  32000
llama-65b           llama     8192  80  64  64  22016  32000
llama-2-7b          llama     4096  32  32  32  11008  32000
llama-2-13b         llama     5120  40  40  40  13824  32000
llama-2-70b         llama     8192  80  64   8  28672  32000
codellama-7b        llama     4096  32  32  32  11008  32016
codellama-34b       llama     8192  48  64   8  22016  32000
llama-3-8b          llama     4096  32  32   8  14336 128256
llama-3-70b         llama     8192  80  64   8  28672 128256
llama-3.1-8b        llama     4096  32  32   8  14336 128256
llama-3.1-70b       llama     8192  80  64   8  28672 128256
llama-3.1-405b      llama    16384 126 128   8  53248 128256
llama-3.2-1b        llama     2048  16  32   8   8192 128256 tied
llama-3.2-3b        llama     3072  28  24   8   8192 128256 tied
llama-3.3-70b       llama     8192  80  64   8  28672 128256
tinyllama-1.1b      llama     2048  22  32   4   5632  32000
smollm2-135m        llama      576  30   9   3   1536  49152 tied
smollm2-360m        llama      960  32  15   5   2560  49152 tied
smollm2-1.7b        llama     2048  24  32  32   8192  49152 tied
yi-6b               llama     4096  32  32   4  11008  64000
yi-34b              llama     7168  60  56   8  20480  64000
mistral-7b-v0.1     mistral   4096  32  32   8  14336  32000
mistral-7b-v0.2     mistral   4096  32  32   8  14336  32000
mistral-7b-v0.3     mistral   4096  32  32   8  14336  32768
mixtral-8x7b        mixtral   4096  32  32   8  14336  32000 experts=8/2
mixtral-8x22b       mixtral   6144  56  48   8  16384  32768 experts=8/2
qwen2.5-0.5b        qwen2      896  24  14   2   4864 151936 tied
qwen2.5-1.5b        qwen2     1536  28  12   2   8960 151936 tied
qwen2.5-3b          qwen2     2048  36  16   2  11008 151936 tied
qwen2.5-7b          qwen2     3584  28  28   4  18944 152064
qwen2.5-14b         qwen2     5120  48  40   8  13824 152064
qwen2.5-32b         qwen2     5120  64  40   8  27648 152064
qwen2.5-72b         qwen2     8192  80  64   8  29568 152064
qwen2-7b            qwen2     3584  28  28   4  18944 152064
qwen2-72b           qwen2     8192  80  64   8  29568 152064
qwen3-0.6b          qwen3     1024  28  16   8   3072 151936 tied head=128
qwen3-1.7b          qwen3     2048  28  16   8   6144 151936 tied head=128
qwen3-4b            qwen3     2560  36  32   8   9728 151936 tied head=128
qwen3-8b            qwen3     4096  36  32   8  12288 151936 head=128
qwen3-14b           qwen3     5120  40  40   8  17408 151936 head=128
qwen3-32b           qwen3     5120  64  64   8  25600 151936 head=128
qwen3-30b-a3b       qwen3_moe 2048  48  32   4   6144 151936 head=128 experts=128/8 moe=768
qwen3-235b-a22b     qwen3_moe 4096  94  64   4  12288 151936 head=128 experts=128/8 moe=1536
gemma-2b            gemma     2048  18   8   1  16384 256000 tied head=256
gemma-7b            gemma     3072  28  16  16  24576 256000 tied head=256
gemma-2-2b          gemma2    2304  26   8   4   9216 256000 tied head=256
gemma-2-9b          gemma2    3584  42  16   8  14336 256000 tied head=256
gemma-2-27b         gemma2    4608  46  32  16  36864 256000 tied head=128
gpt2                gpt2       768  12  12  12   3072  50257 tied
gpt2-medium         gpt2      1024  24  16  16   4096  50257 tied
gpt2-large          gpt2      1280  36  20  20   5120  50257 tied
gpt2-xl             gpt2      1600  48  25  25   6400  50257 tied
pythia-14m          gpt_neox   128   6   4   4    512  50304
pythia-70m          gpt_neox   512   6   8   8   2048  50304
pythia-160m         gpt_neox   768  12  12  12   3072  50304
pythia-410m         gpt_neox  1024  24  16  16   4096  50304
pythia-1b           gpt_neox  2048  16   8   8   8192  50304
pythia-1.4b         gpt_neox  2048  24  16  16   8192  50304
pythia-2.8b         gpt_neox  2560  32  32  32  10240  50304
pythia-6.9b         gpt_neox  4096  32  32  32  16384  50432
pythia-12b          gpt_neox  5120  36  40  40  20480  50688
gpt-neox-20b        gpt_neox  6144  44  64  64  24576  50432
phi-3-mini          phi3      3072  32  32  32   8192  32064
phi-3-medium        phi3      5120  40  40  10  17920  32064
"""

ROW_TOKENS = {"openai/gsm8k": 190}
"""Average tokens per row: question and answer in ChatML, with SmolLM2's tokenizer."""

_ENDINGS = re.compile(
    r"-(instruct|chat|base|it|hf|\d+k|\d{4}|intermediate.*|step.*|bnb.*|deduped|for.*)(?=-|$)"
)


def _key(name: str) -> str:
    last = name.rsplit("/", 1)[-1].lower().replace("_", "-").removeprefix("meta-")
    return re.sub(r"[-\s]", "", _ENDINGS.sub("", last))


def _row(line: str) -> tuple[str, dict[str, Any]]:
    name, kind, *numbers = line.split()
    h, layers, heads, kv, width, vocab = (int(number) for number in numbers[:6])
    config: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": h,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": width,
        "vocab_size": vocab,
        "tie_word_embeddings": "tied" in numbers[6:],
    }
    if kind == "gpt2":  # its config uses different names
        config |= {"n_embd": h, "n_layer": layers, "n_head": heads, "n_inner": width}
    for word in numbers[6:]:
        field, _, value = word.partition("=")
        if field == "head":
            config["head_dim"] = int(value)
        elif field == "experts":
            count, active = value.split("/")
            many = "num_local_experts" if kind == "mixtral" else "num_experts"
            config |= {many: int(count), "num_experts_per_tok": int(active)}
        elif field == "moe":
            config["moe_intermediate_size"] = int(value)
    return name, config


CONFIGS: dict[str, dict[str, Any]] = dict(_row(line) for line in _TABLE.strip().splitlines())
_KEYS = {_key(name): name for name in CONFIGS}


AUTHORS = (
    "meta-llama", "huggyllama", "codellama", "tinyllama", "huggingfacetb", "01-ai", "mistralai",
    "qwen", "google", "openai-community", "eleutherai", "microsoft",
)  # fmt: skip
"""Hub organizations that published the models of the table."""


def row(name: str) -> str | None:
    """The row of a model, by hub id or short name; None if it is not in the table."""
    key = _key(name)
    return _KEYS.get(key) or _KEYS.get(re.sub(r"v\d\.\d$", "", key)) or _KEYS.get(f"{key}v0.1")


def find(name: str) -> dict[str, Any] | None:
    """The config of a model, by hub id or short name; None if it is not in the table."""
    found = row(name)
    return None if found is None else CONFIGS[found]


def source(name: str) -> str:
    """Source of the config from `find`; for a model of another author only the name matches."""
    author, _, rest = name.rpartition("/")
    if not author or author.lower() in AUTHORS:
        return "the table of published shapes"
    return (
        f"the table of published shapes: {name} is assumed to have that of {row(rest)}, which it "
        "is called after; a folder with its config.json as model.name says for certain"
    )
