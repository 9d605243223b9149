"""Check on two layers of a model that it trains correctly, compared with plain libraries."""

import contextlib
import dataclasses
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peft import PeftModel

from finetune.cache import cache
from finetune.distributed.base import Engine
from finetune.errors import FinetuneError
from finetune.models import soundness, targets
from finetune.models.image_parts import image_inputs
from finetune.models.load_checks import token_rows
from finetune.models.model import load_chat_of, load_tokenizer
from finetune.models.packed_attention import layout
from finetune.models.quantization import quantised_notes
from finetune.planner import plan
from finetune.process.progress import progress
from finetune.recipe import Data, Recipe
from finetune.runs.run import Run
from finetune.training.run_options import Options
from finetune.verification.model_checks import reference
from finetune.verification.model_checks.finding import Finding
from finetune.verification.model_checks.target import ROWS, described, small
from finetune.verification.proofs.exports import Delivery, check_deliveries
from finetune.verification.proofs.matrix import FP32
from finetune.verification.proofs.small_recipe import Subject

LOSS, GRADIENT = 1e-5, 1e-3
"""Maximum relative differences of a mean loss and of the full gradient due to fp32 rounding.

Sums in a different order differ by about 1e-7 per product, and a gradient passes through two layers
of products; a wrong mask, scale or position gives a difference of more than 1 %."""


class Examination:
    """The checks of a model, and the values that later checks reuse."""

    def __init__(self, recipe: Recipe, folder: Path, cache: Path) -> None:
        self.asked = recipe
        self.folder = folder
        self.cache = cache
        self.about = ""
        """Description of the shrunk model, in one line."""
        self.notes: tuple[str, ...] = ()
        """Differences of the shrunk model and its data from the request."""

    def findings(self) -> Iterator[Finding]:
        """Findings in order; ends early if the model cannot be prepared."""
        yield self._ask("plan", self._plan)
        prepared = self._ask("two layers of it", self._prepare)
        yield prepared
        if not prepared.passed:
            return
        answered = dict[str, bool]()
        for name, question, needs in (
            ("loss", self._loss, None),
            ("gradients", self._gradients, "loss"),
            ("images", self._images, "loss"),
            ("causal", self._causal, "loss"),
            ("adapted", self._adapted, "loss"),
            ("quantised", self._quantised, "loss"),
            ("experts", self._experts, "loss"),
            ("documents side by side", self._side_by_side, "loss"),
            ("activation checkpointing", self._checkpointing, "loss"),
            ("two steps", self._train, None),
            ("saved, reloaded, merged", self._reload, "two steps"),
            ("stop tokens", self._stops, "two steps"),
        ):
            if needs is not None and not answered[needs]:
                yield Finding(name, None, f"not checked, because of `{needs}`")
                continue
            finding = self._ask(name, question)
            answered[name] = finding.passed is True
            yield finding

    def _ask(self, name: str, question: Callable[[], tuple[bool | None, str]]) -> Finding:
        """The finding of one check; any exception of the model's code makes it fail."""
        quiet = io.StringIO()
        try:
            with (
                progress(f"checking {name}"),
                contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet),
            ):  # fmt: skip
                passed, why = question()
        except FinetuneError as error:
            return Finding(name, False, "; ".join(error.problems), refused=True)
        except Exception as error:  # code of transformers, PEFT or the model's repository
            first = str(error).strip().split("\n")[0]
            return Finding(name, False, f"{type(error).__name__}: {first}")
        return Finding(name, passed, why)

    def _plan(self) -> tuple[bool, str]:
        # A model given without a recipe has no data; the plan is the same for any data.
        data = self.asked.data or (Data("rows.jsonl", "messages"),)
        planned = plan(dataclasses.replace(self.asked, data=data))
        notes = "".join(f"; {note}" for note in planned.notes())
        count = planned.processes
        return True, f"{planned.backend.name}, {count} process{'es' * (count > 1)}{notes}"

    def _prepare(self) -> tuple[bool, str]:
        self.subject: Subject = small(self.asked, self.folder, self.cache)
        self.recipe: Recipe = self.subject.recipe
        self.about, self.notes = described(str(self.subject.recipe.model.name)), self.subject.notes
        self.pad_id = load_tokenizer(self.recipe).pad_token_id or 0
        chat = load_chat_of(self.recipe)
        self.images = image_inputs(self.recipe.model, chat.images, alone=True)
        self.rows = dataclasses.replace(self.subject.data.train, image_inputs=self.images)
        return True, self.about

    def _outcome(
        self, recipe: Recipe, look: Callable[[Engine], None] | None = None
    ) -> reference.Outcome:
        # Plain transformers balances experts over a whole forward pass, not by document.
        model = dataclasses.replace(recipe.model, router_aux_loss="none")
        recipe = dataclasses.replace(recipe, model=model)
        with reference.ours(recipe, self.folder / "offload") as engine:
            free = layout(recipe, engine.module.config).free
            rows = dataclasses.replace(self.rows, padding_free=free)
            found = reference.outcome(engine, recipe, rows, self.pad_id)
            if look is not None:
                look(engine)
        return found

    def _look(self, engine: Engine) -> None:
        """Store what later checks need from the model."""
        network: Any = engine.module
        is_adapted = isinstance(network, PeftModel)
        base: Any = network.get_base_model() if is_adapted else network
        kind = self.recipe.model.quantization
        self.values = reference.values(network)
        self.config = network.peft_config["default"] if is_adapted else None
        self.layout = layout(self.recipe, base.config)
        self.kind, self.recomputes = base.config.model_type, base.supports_gradient_checkpointing
        self.has_experts = targets.has_experts(base)
        self.balance = base.balance
        self.reach = targets.reach(network, base).line() if is_adapted else None
        self.packed = quantised_notes(base, kind)
        self.left_out = [note for note in engine.notes if note.startswith("not trained")]
        rows = token_rows(network) or 0
        self.causality = soundness.causality(
            engine.model, rows, engine.device, side_by_side=self.layout.free
        )

    def _loss(self) -> tuple[bool, str]:
        self.ours = self._outcome(self.recipe, self._look)
        self.plain = reference.plain_outcome(self.recipe, self.rows, self.values, self.config)
        loss, self.gradient_apart = self.ours.apart(self.plain)
        return loss <= LOSS, (
            f"{self.ours.loss:.6f}, in transformers{self._and_peft} {self.plain.loss:.6f} "
            f"({loss:.1e} apart)"
        )

    @property
    def _and_peft(self) -> str:
        return "" if self.recipe.adapter is None else " + PEFT"

    def _gradients(self) -> tuple[bool, str]:
        missing = sorted(self.plain.gradients.keys() - self.ours.gradients.keys())
        note = f"; none for {missing[0]}" if missing else ""
        return self.gradient_apart <= GRADIENT, (
            f"{len(self.ours.gradients)} tensors, {self.gradient_apart:.1e} from those of "
            f"transformers{self._and_peft}{note}"
        )

    def _images(self) -> tuple[bool | None, str]:
        if self.images is None:
            return None, "the model reads text only"
        picked = range(min(ROWS, len(self.rows)))
        numbers = [int(number) for n in picked for number in self.rows.numbers(n)]
        seen = [self.rows.documents.images_of(number) for number in numbers]
        tokens = sum(each.end - each.start for images in seen for each in images)
        counts = ", ".join(str(len(images)) for images in seen)
        return any(seen), f"documents with {counts} images, {tokens} tokens"

    def _causal(self) -> tuple[bool, str]:
        if self.causality.leak:
            return False, soundness.described(self.causality.leak)
        return True, "later tokens do not change the logits of earlier ones"

    def _adapted(self) -> tuple[bool | None, str]:
        if self.reach is None:
            return None, "all weights are trained"
        return True, "; ".join([self.reach, *self.left_out])

    def _quantised(self) -> tuple[bool | None, str]:
        return (True, self.packed[0]) if self.packed else (None, "the base is not quantised")

    def _experts(self) -> tuple[bool | None, str]:
        if not self.has_experts:
            return None, "the model is not a mixture of experts"
        if self.balance is None:
            return True, "no load-balancing loss is added"
        return True, f"the load-balancing loss is added with factor {self.balance.coefficient:g}"

    def _compared(self, changed: Recipe) -> tuple[bool, str]:
        """Compare loss and gradient of the same rows under a change that must not affect them."""
        loss, gradient = self._outcome(changed).apart(self.ours)
        return loss <= LOSS and gradient <= GRADIENT, (
            f"loss {loss:.1e} and gradient {gradient:.1e} from rows by themselves"
        )

    def _side_by_side(self) -> tuple[bool | None, str]:
        if not self.layout.free:
            return (False if self.recipe.batch.packing else None), self.layout.line()
        batch = dataclasses.replace(self.recipe.batch, packing=False, padding_free=False)
        model = dataclasses.replace(self.recipe.model, attention="eager")  # all models support it
        passed, why = self._compared(dataclasses.replace(self.recipe, batch=batch, model=model))
        return passed, why.replace("rows by themselves", "padded rows")

    def _checkpointing(self) -> tuple[bool | None, str]:
        if not self.recomputes and not self.recipe.model.activation_checkpointing:
            return None, f"transformers cannot recompute activations of {self.kind}"
        model = dataclasses.replace(self.recipe.model, activation_checkpointing=True)
        passed, why = self._compared(dataclasses.replace(self.recipe, model=model))
        return passed, why.replace("rows by themselves", "a step that keeps activations")

    def _train(self) -> tuple[bool, str]:
        from finetune.training.worker import train

        options = Options(self.folder / "run", plot=False)
        self.run: Run = train(self.recipe, "single", "fp32", options=options)
        losses = [record["loss"] for record in self.run.read_metrics("train")]
        return True, f"losses {', '.join(f'{loss:.4f}' for loss in losses)}"

    def _reload(self) -> tuple[bool, str]:
        delivery = Delivery("own", "single", self.subject, self.run, bf16=False)
        (check,) = check_deliveries([delivery], FP32)
        return bool(check.passed), check.summary

    def _stops(self) -> tuple[bool | None, str]:
        chat = load_chat_of(self.recipe)
        picked = (self.rows.row(index) for index in range(min(ROWS, len(self.rows))))
        ends = {int(ids[is_trained][-1]) for ids, is_trained in picked} & chat.end_tokens
        named = ", ".join(repr(chat.tokenizer.decode([end])) for end in sorted(ends))
        if not ends:
            return False, "rows are not trained to end, so the model would never stop"
        stored = json.loads((self.run.final / "generation_config.json").read_text("utf-8"))
        stops = stored.get("eos_token_id")
        lost = ends - set(stops if isinstance(stops, list) else [stops])
        if lost:
            return False, f"trained to end with {named}, but final/ stops at {stops}"
        return True, f"trained to end with {named}, and final/ stops there"


def doctor(recipe: Recipe) -> list[Finding]:
    """Findings of `finetune doctor`, in seconds and without a GPU, on two layers of the model.

    Raises:
        FinetuneError: the recipe's data cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="finetune-doctor-") as folder:
        return list(Examination(recipe, Path(folder), cache("data")).findings())
