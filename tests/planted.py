"""Plant one fault at a time into a copy of the code, and report which test finds it.

    python -m tests.planted                 all faults, two copies at a time
    python -m tests.planted clip moment     those whose names contain one of the words

A fault is a change of one place. The test files that should notice it run in the copy until the
first failure; at the end, the tests that failed have to pass in an unchanged copy. The exit status
is 1 if a fault is not found. Nothing is written into the checkout.
"""

import atexit
import gc
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

import pytest

ROOT = Path(__file__).parent.parent
COPIES = 2
LIMIT_SECONDS = 900
"""Seconds for the tests of a fault; it counts as not found after them."""
LIBRARIES = ("torch", "transformers.models.llama.modeling_llama", "peft", "accelerate", "datasets")
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?\.py::.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """A change of one place, and the test files that find it."""

    name: str
    file: str
    """Path below `finetune/`."""
    old: str
    """Occurs once in the file."""
    new: str
    finders: str
    """Names of test files, without `test_` and `.py`."""
    slow: bool = False
    """Whether only slow tests find it."""


FAULTS = [
    # --- the loss, and the sum of micro-batches and processes ---
    Fault("accumulation-not-scaled", "training/loop.py",
          "engine.averaged * plan.accumulation / max", "engine.averaged / max", "optim"),
    Fault("ranks-not-scaled", "training/loop.py",
          "engine.averaged * plan.accumulation / max", "plan.accumulation / max", "backends"),
    Fault("mean-of-micro-batch-means", "training/loop.py",
          "(loss) * (scale * engine.scale.value)",
          "(loss) * engine.averaged * engine.scale.value / max(1, batches[index].trained_tokens)",
          "optim"),
    Fault("evaluation-mean-of-ranks", "training/loop.py",
          "loss=total[LOSS] / max(1.0, total[TERMS]),",
          "loss=engine.sum([found[LOSS] / max(1.0, float(terms))])[0] / engine.world,",
          "backends"),
    Fault("label-shift", "methods/losses.py",
          "places = row * length + column if", "places = row * length + column + 1 if", "optim"),
    # --- the optimizer and its schedule ---
    Fault("clip-off", "distributed/base.py", 'float("inf") if limit is None else limit',
          'float("inf")', "optim"),
    Fault("betas-are-defaults", "training/optim.py",
          ' = {"lr": peak, "betas": optim.betas, "eps": optim.eps}\n    like',
          ' = {"lr": peak, "betas": (0.9, 0.999), "eps": optim.eps}\n    like', "optim"),
    Fault("norms-are-decayed", "training/optim.py", "dimensions(parameter) >= 2 else 0.0",
          "dimensions(parameter) >= 1 else 0.0", "optim"),
    Fault("cosine-quarter", "training/optim.py", "0.5 * (1 + math.cos(math.pi * done))",
          "math.cos(math.pi * done / 2)", "optim"),
    Fault("warmup-from-zero", "training/optim.py", "peak * (step + 1) / warmup",
          "peak * step / warmup", "optim"),
    Fault("min-lr-is-a-floor", "training/optim.py",
          "(optim.min_lr + (1 - optim.min_lr) * left)", "max(optim.min_lr, left)", "optim"),
    Fault("dropout-same-on-each-rank", "training/loop.py",
          "step, number) for number in rows.numbers",
          "step, number) for number, _ in enumerate(rows.numbers)", "optim"),
    Fault("fp16-gradient-stays-scaled", "distributed/loss_scale.py",
          "gradient.div_(self.value)", "pass", "fp16"),
    Fault("overflow-is-applied", "distributed/base.py", "taken = math.isfinite(norm)",
          "taken = True", "fp16"),
    # --- optimizers, groups and noise ---
    Fault("narrow-second-moment-not-unbiased", "training/narrow_adamw.py",
          "div_(math.sqrt(1 - b2**step))", "div_(1 - b2**step)", "optim"),
    Fault("narrow-codes-swapped", "training/narrow_adamw.py", "(codes & 15, codes >> 4)",
          "(codes >> 4, codes & 15)", "optim"),
    Fault("muon-scaled-by-the-short-side", "distributed/muon.py",
          "math.sqrt(max(part.shape[-2:]))", "math.sqrt(min(part.shape[-2:]))", "optim"),
    Fault("muon-without-nesterov", "distributed/muon.py", "gradient.lerp(moment, momentum).to",
          "moment.to", "optim"),
    Fault("last-group-wins", "training/optim.py", "                break\n        decay =",
          "        decay =", "optim"),
    Fault("lora-plus-of-the-other-factor", "training/optim.py", 'if "lora_B" in name else 1.0',
          'if "lora_A" in name else 1.0', "optim"),
    Fault("noise-of-padding-counts", "models/embedding_noise.py",
          "(length.clamp(min=1) * width).sqrt()", "(noise.tokens.shape[-1] * width) ** 0.5",
          "neftune"),
    Fault("noise-same-in-each-step", "training/loop.py", "alpha, (recipe.seed, step))",
          "alpha, (recipe.seed, 0))", "neftune"),
    Fault("dft-with-a-gradient", "kernels/token_loss.py", "(-losses.detach()).exp() if",
          "(-losses).exp() if", "kernels_head"),
    Fault("eaft-of-all-logits", "kernels/token_loss.py", "topk(min(TOP, given.shape[1]), -1)",
          "topk(given.shape[1], -1)", "kernels_head"),
    Fault("smoothing-only-in-the-loss", "kernels/chunked_loss.py",
          "by_logits -= smoothing / logits.shape[1]", "by_logits -= 0", "kernels_head"),
    Fault("top-k-one-more", "inference/decoder.py", "left_out[row.top_k :] = True",
          "left_out[row.top_k + 1 :] = True", "decoder sampling"),
    Fault("min-p-of-one", "inference/decoder.py", "falling < row.min_p * falling[0]",
          "falling < row.min_p", "decoder sampling"),
    Fault("penalty-of-answers-only", "inference/decoder.py", "sorted({*row.prompt, *row.ids})",
          "sorted({*row.ids})", "decoder sampling"),
    Fault("sigterm-at-first-is-a-failure", "process/signals.py",
          "encode())\n        os._exit(Interrupted.exit_status)",
          "encode())\n        os._exit(143)", "interruption"),
    Fault("repeated-sigterm-abandons-a-save", "process/signals.py",
          "if repeated and not (self.saving and", "if repeated and not (False and",
          "interruption"),
    Fault("frozen-weights-trained", "models/trainable.py",
          "parameter.requires_grad_(id(parameter) in trained)", "parameter.requires_grad_(True)",
          "trainable"),
    # --- second starts ---
    Fault("moment-lost-zero2", "distributed/deepspeed.py",
          "for key in extra.values:\n                target",
          "for key in [*extra.values][:1]:\n                target", "backends"),
    Fault("resume-skips-a-step", "training/stages.py",
          "replace(saved, data=", "replace(saved, step=saved.step + 1, data=", "second_starts"),
    Fault("patience-starts-again", "training/stages.py",
          "replace(saved, data=", "replace(saved, stale=0, data=", "second_starts"),
    Fault("best-is-the-worst", "training/steps.py", "judged < best)", "judged > best)",
          "second_starts"),
    Fault("one-checkpoint-too-many", "checkpoints/saver.py", "run.steps()[:-keep]",
          "run.steps()[: -keep - 1]", "second_starts"),
    Fault("digest-not-verified", "runs/manifest.py", 'elif sha256(path) != known["sha256"]:',
          "elif False:", "damage"),
    # --- the data ---
    Fault("same-order-each-epoch", "data/rows/order.py", "permutation(rows, seed, epoch)[",
          "permutation(rows, seed, 0)[", "order"),
    Fault("last-rows-of-a-step-dropped", "data/rows/order.py",
          "each = -(-len(micro_batches) // world)",
          "each = len(micro_batches) // world", "order"),
    Fault("prompt-is-trained", "methods/sft.py", "chat.render(sample, self.train_on)",
          'chat.render(sample, "all")', "prepare"),
    Fault("end-not-trained", "data/chat/tokens.py",
          "return (first, last + 1) if self", "return (first, last) if self", "prepare"),
    Fault("key-without-variables", "data/fingerprint.py", "dict(chat.variables)],", "{}],",
          "second_starts"),
    Fault("key-without-storage", "training/reference/stored.py",
          "[model.quantization, model.attention",
          "[model.attention", "second_starts"),
    Fault("packs-attend-to-each-other", "models/packed_attention.py",
          "    runs = _runs(ends, longest)\n", "    runs = [[ends[0], ends[-1]]]\n", "packing"),
    Fault("positions-go-on-in-packs", "data/rows/collate.py",
          "positions = np.arange(len(ids)) - np.repeat(ends[:-1], lengths)",
          "positions = np.arange(len(ids))", "packing packed_training"),
    Fault("variables-not-rendered", "data/chat/render.py",
          "return Turns(self.tokenizer, self.template, self.variables)",
          "return Turns(self.tokenizer, self.template, {})", "templates"),
    # --- methods ---
    Fault("kto-kl-of-one-rank", "training/reference/answer_logps.py",
          "engine.sum(brought)", "brought", "kto"),
    Fault("dpo-reference-added", "methods/pairs.py", 'logps - batch.columns["reference"] if',
          'logps + batch.columns["reference"] if', "dpo"),
    Fault("dpo-smoothing-sign", "methods/dpo.py",
          "return -(1 - e) * logsigmoid(scaled) - e * logsigmoid(-scaled)",
          "return -(1 - e) * logsigmoid(scaled) + e * logsigmoid(-scaled)", "dpo"),
    Fault("orpo-odds-of-one", "methods/orpo.py", "mean - torch.log(-torch.expm1(mean))", "mean",
          "pair_methods"),
    Fault("simpo-margin-sign", "methods/simpo.py", "answers.rejected) - self.gamma)",
          "answers.rejected) + self.gamma)", "pair_methods"),
    Fault("reward-pair-swapped", "methods/reward.py", "chosen, rejected = scores.unbind(1)",
          "rejected, chosen = scores.unbind(1)", "scores"),
    Fault("distill-temperature", "kernels/divergence.py",
          "shares.both(wide / taught.temperature, part", "shares.both(wide, part", "distill"),
    Fault("grpo-kl-sign", "methods/grpo.py", "extra = self.beta * spread",
          "extra = -self.beta * spread", "online"),
    Fault("grpo-clip-swapped", "methods/grpo.py", "ratio.clamp(1 - low, 1 + high)",
          "ratio.clamp(1 - high, 1 + low)", "online"),
    Fault("advantage-population-std", "methods/online.py", "np.maximum(numbers - 1, 1))",
          "np.maximum(numbers, 1))", "rollouts"),
    # --- results ---
    Fault("alpha-ignored", "models/adapters.py", "lora_alpha=adapter.scale_alpha",
          "lora_alpha=2 * adapter.r", "adapters"),
    Fault("merge-without-scale", "exporters/low_rank.py", "part.mul_(scale)", "part.mul_(1.0)",
          "merge"),
    Fault("gguf-scores-in-order-of-ids", "exporters/gguf_tokens.py", "merge_scores(tokenizer))",
          "{})", "gguf"),
    Fault("temperature-ignored", "inference/decoder.py", " / heat)", ")",
          "sampling"),
    Fault("top-p-one-token-short", "inference/decoder.py", "before = falling.cumsum(-1) - falling",
          "before = falling.cumsum(-1)", "decoder"),
    Fault("plan-without-moments", "planner/estimate/sharding/resident.py",
          "moments = workload.moments * workload.sharded", "moments = workload.sharded",
          "planner_memory"),
    Fault("override-at-the-last-sign", "catalog.py", 'pair.partition("=")',
          'pair.rpartition("=")', "catalog cli"),
    Fault("silence-of-a-host-ignored", "distributed/heartbeat.py",
          "if beat is None:\n            return None\n        if self._silence",
          "if beat is not None:\n            return None\n        if self._silence", "heartbeat"),
    Fault("proof-compares-nothing", "verification/proofs/checks.py",
          "compare_steps(alone, here, steps,", "compare_steps(alone, here, range(0),",
          "prover"),
]  # fmt: skip


def main(words: Sequence[str]) -> int:
    chosen = [each for each in FAULTS if not words or any(word in each.name for word in words)]
    if wrong := misplaced(chosen):
        print("\n".join(wrong))
        return 2
    started = time.monotonic()
    prepare()
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(COPIES):
            copies.put(Copy(Path(name) / f"{number}"))

        def plant(fault: Fault) -> str | None:
            copy = copies.get()
            try:
                test, what = copy.plant(fault)
            finally:
                copies.put(copy)
            print(f"{'found' if test else 'NOT FOUND':9}  {fault.name:31}{what}", flush=True)
            return test

        with ThreadPoolExecutor(COPIES) as pool:
            tests = list(pool.map(plant, chosen))
        failing = copies.get().failing_without_fault({test for test in tests if test is not None})
    for test in failing:
        print(f"NOT FOUND  {test} fails without a fault too")
    found = [test is not None and test not in failing for test in tests]
    everyday = sum(is_found and not f.slow for is_found, f in zip(found, chosen, strict=True))
    seconds = time.monotonic() - started
    print(f"{sum(found)} of {len(chosen)} found, {everyday} by everyday tests, in {seconds:.0f} s")
    return 0 if all(found) else 1


def misplaced(faults: Sequence[Fault]) -> list[str]:
    """What faults no longer fit to in the code and its tests."""
    wrong = list[str]()
    for fault in faults:
        path = ROOT / "finetune" / fault.file
        count = path.read_text(encoding="utf-8").count(fault.old) if path.is_file() else 0
        if count != 1:
            wrong.append(f"{fault.name}: {fault.file} has its text {count} times, not once")
        for name in fault.finders.split():
            if not (ROOT / f"tests/test_{name}.py").is_file():
                wrong.append(f"{fault.name}: there is no tests/test_{name}.py")
    return wrong


def prepare() -> None:
    """Import what every test run needs, but nothing of this package, so that runs are forks."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "KINETO_LOG_LEVEL": "99"}
    os.environ.setdefault("FINETUNE_ASSETS", str(ROOT.parent / "shared" / "assets"))
    sys.path[:] = [each for each in sys.path if Path(each or ".").resolve() != ROOT]
    for name in LIBRARIES:
        importlib.import_module(name)
    assert not any(name.split(".")[0] == "finetune" for name in sys.modules)
    gc.freeze()


class Copy:
    """A copy of the checkout's files that holds one fault at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output = folder / "code", folder / "output"
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, files.split("\0")):
            if (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name)

    def plant(self, fault: Fault) -> tuple[str | None, str]:
        """The test that finds a fault, or None; and the seconds with the test, or the reason."""
        path = self.folder / "finetune" / fault.file
        text = path.read_text(encoding="utf-8")
        files = [f"tests/test_{name}.py" for name in fault.finders.split()]
        kind = "slow and not gpu" if fault.slow else "not slow and not gpu"
        started = time.monotonic()
        try:
            self._write(path, text.replace(fault.old, fault.new))
            status = self._pytest("-x", "-m", kind, *files)
        finally:
            self._write(path, text)
        seconds = f"{time.monotonic() - started:4.0f} s  "
        failed = FAILED.findall(self.output.read_text(errors="replace"))
        if status != 1 or not failed:
            return None, f"{seconds}{' '.join(files)}: status {status}"
        return failed[0], f"{seconds}{failed[0]}"

    def failing_without_fault(self, tests: set[str]) -> set[str]:
        """Those of the tests that also fail in an unchanged copy."""
        if not tests or self._pytest(*sorted(tests)) == 0:
            return set()
        failed = set(FAILED.findall(self.output.read_text(errors="replace")))
        return failed or tests

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # Python compares the second and the size of a source, which may both be those of before.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def _pytest(self, *words: str) -> int:
        """Run tests of the copy in a fork of this process; returns the status, -1 if it is late."""
        self.output.unlink(missing_ok=True)
        process = os.fork()
        if not process:
            self._become_pytest(words)
        until = time.monotonic() + LIMIT_SECONDS
        while not (ended := os.waitpid(process, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
                return -1
            time.sleep(0.05)
        return os.waitstatus_to_exitcode(ended[1])

    def _become_pytest(self, words: Sequence[str]) -> NoReturn:
        status = 3
        try:
            os.setsid()
            atexit._clear()  # what the first process has to do, such as removing its copies
            output = os.open(self.output, os.O_WRONLY | os.O_CREAT)
            for stream in (1, 2):
                os.dup2(output, stream)
            os.chdir(self.folder)
            sys.path.insert(0, str(self.folder))
            temporary = str(self.folder.parent / "temporary")
            status = pytest.main(["-p", "no:cacheprovider", "--basetemp", temporary, *words])
            sys.stdout.flush()
        finally:
            atexit._run_exitfuncs()
            os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
