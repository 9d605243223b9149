"""Export a GGUF file with the converter of a llama.cpp checkout."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from finetune.checkpoints.stop_tokens import saved_tokenizer
from finetune.data.chat.render import load_chat
from finetune.data.chat.turns import QUESTION
from finetune.data.samples import Completion, Conversation
from finetune.errors import FinetuneError, TrainingFailure, did_you_mean
from finetune.exporters import gguf_tokens, whole_model
from finetune.exporters.check import prompt_text, prompts
from finetune.exporters.source import Source
from finetune.inference.generate import turn_end
from finetune.inference.load import base_config
from finetune.reports.card import Kind
from finetune.version import install

CONVERTER = "convert_hf_to_gguf.py"
CHECKOUT = "git clone --depth 1 https://github.com/ggml-org/llama.cpp"
TYPES = ("f32", "f16", "bf16", "q8_0")
"""Types that the converter writes; `llama-quantize` makes other types from f16."""
READ_ROWS = 20
"""Number of the run's rows whose prompts are tokenized as in llama.cpp."""


def check(source: Source) -> None:
    """Reject models that llama.cpp cannot convert, before anything is merged.

    Raises:
        FinetuneError: the model reads images, no checkout is given, it does not support the
            tokenizer or the architecture, it lacks `llama-quantize`, the type is unknown, or the
            model cannot be merged.
    """
    if source.recipe.model.reads:
        raise FinetuneError(
            "--format gguf: a model that reads images is two files there, and this format writes "
            f"one; export it as merged, and convert that folder twice: {CONVERTER} FOLDER, and "
            f"{CONVERTER} FOLDER --mmproj"
        )
    checkout = find_checkout(source.llama_cpp)
    _quantiser(source, checkout)
    with tempfile.TemporaryDirectory() as name:
        _check_tokenizer(source, checkout, Path(name))
    whole_model.check_whole(source)


def write(source: Source, folder: Path) -> Kind:
    """Write `model-TYPE.gguf`, with a tokenizer that gives the token ids of training.

    Call `check` first.

    Raises:
        TrainingFailure: a program of the checkout failed.
    """
    checkout = find_checkout(source.llama_cpp)
    kind = source.gguf_type
    first = kind if kind in TYPES else "f16"
    quantiser = _quantiser(source, checkout)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".whole") as name:
        whole = Path(name)
        whole_model.write_whole(source, whole)
        _save_tokenizer(source, whole)
        target = folder / f"model-{first}.gguf"
        _convert(checkout, whole, target, "--outtype", first)
        gguf_tokens.repair(target, whole)
        if quantiser is not None:
            quantised = folder / f"model-{kind}.gguf"
            _run([str(quantiser), str(target), str(quantised), kind], "quantising failed")
            target.unlink()
    return "gguf"


def find_checkout(named: Path | None) -> Path:
    """The folder of a llama.cpp checkout.

    Raises:
        FinetuneError: no folder is given, it is not a checkout, or Python packages of the converter
            are missing.
    """
    advice = f"get one with `{CHECKOUT}`"
    if named is None:
        raise FinetuneError(
            "--llama-cpp: name a checkout of llama.cpp, whose converter writes GGUF, here or in "
            f"LLAMA_CPP_DIR; {advice}"
        )
    if not (named / CONVERTER).is_file():
        raise FinetuneError(f"--llama-cpp {named}: it has no {CONVERTER}; {advice}")
    missing = [each for each in ("gguf", "sentencepiece") if importlib.util.find_spec(each) is None]
    if missing:
        raise FinetuneError(f"--format gguf needs {' and '.join(missing)}: {install('gguf')}")
    return named


def _quantiser(source: Source, checkout: Path) -> Path | None:
    """`llama-quantize` for types that the converter does not write; None for the others."""
    from gguf import LlamaFileType

    kind = source.gguf_type
    if kind in TYPES:
        return None
    known = [name.removeprefix("MOSTLY_").lower() for name in LlamaFileType.__members__]
    if kind not in known:
        raise FinetuneError(
            f"--gguf-type: got '{kind}', expected one of {', '.join(TYPES)}, q4_k_m or another "
            f"type of llama-quantize{did_you_mean(kind, known)}"
        )
    return find_quantiser(checkout)


def find_quantiser(checkout: Path) -> Path:
    """`llama-quantize` of the checkout, or on PATH.

    Raises:
        FinetuneError: the program is not found.
    """
    built = checkout / "build" / "bin" / "llama-quantize"
    found = built if built.is_file() else shutil.which("llama-quantize")
    if found is None:
        raise FinetuneError(
            f"--gguf-type: needs llama-quantize, which is not in {built.parent} nor on PATH; build "
            f"it with `cmake -B build && cmake --build build --target llama-quantize`, or write "
            f"one of {', '.join(TYPES)}"
        )
    return Path(found)


def _check_tokenizer(source: Source, checkout: Path, folder: Path) -> None:
    """Convert only tokenizer and configuration, before anything is merged."""
    base_config(source.recipe).save_pretrained(folder)
    _save_tokenizer(source, folder)
    target = folder / "vocabulary.gguf"
    try:
        _convert(checkout, folder, target, "--vocab-only")
        gguf_tokens.repair(target, folder)
    except TrainingFailure as error:
        raise FinetuneError(f"--format gguf: {error}; --format merged needs no llama.cpp") from None
    check_ids(source, target)
    target.unlink()


def _save_tokenizer(source: Source, folder: Path) -> None:
    """Save the tokenizer for the converter, with explicit values instead of its defaults."""
    saved_tokenizer(source.tokenizer, turn_end(source.tokenizer)).save_pretrained(folder)
    chat = load_chat(source.tokenizer, None)
    asked = Completion("a", "b") if chat.template is None else Conversation((QUESTION,))
    opens = chat.prompt(asked)[:1] == [source.tokenizer.bos_token_id]
    gguf_tokens.state_defaults(folder, opens)


def check_ids(source: Source, vocabulary: Path) -> None:
    """Check that llama.cpp gives prompts of the run the token ids of training.

    Raises:
        FinetuneError: ids differ; the message has the first of them.
    """
    reader = gguf_tokens.open_reader(vocabulary)
    if reader is None:  # the converter identifies this tokenizer by the ids of its own test text
        return
    chat = load_chat(source.tokenizer, None)
    for prompt in prompts(source.recipe, READ_ROWS):
        wanted, got = chat.prompt(prompt), reader.ids(prompt_text(source.tokenizer, prompt))
        if got != wanted:
            pairs = zip(got, wanted, strict=False)
            place = next((n for n, (one, other) in enumerate(pairs) if one != other), 0)
            near = slice(max(0, place - 2), place + 4)
            raise FinetuneError(
                "--format gguf: llama.cpp would tokenize differently than training: from token "
                f"{place} of a prompt, {got[near]} instead of {wanted[near]}; export it as "
                "merged, and serve it with `finetune serve` or vLLM"
            )


def _convert(checkout: Path, folder: Path, target: Path, *words: str) -> None:
    command = [sys.executable, str(checkout / CONVERTER), str(folder), "--outfile", str(target)]
    own = checkout / "gguf-py"
    paths = [str(own)] if own.is_dir() else []
    paths += [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    _run([*command, *words], f"{checkout / CONVERTER} failed", env)
    if not target.is_file():
        raise TrainingFailure(f"{checkout / CONVERTER}: it did not write {target.name}")


def _run(command: list[str], failure: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines()]
        errors = [line for line in lines if "error" in line.lower()] or lines or ["no message"]
        raise TrainingFailure(f"{failure}: {errors[-1].removeprefix('ERROR:')}")
