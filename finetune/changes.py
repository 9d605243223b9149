"""The `with_...` methods of a recipe, each of which returns a modified copy.

Their signatures repeat the fields of the sections for editors and type checkers; a test compares
them.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar, cast

if TYPE_CHECKING:
    from finetune.recipe import Data, Model

Method = TypeVar("Method", bound=Callable[..., Any])


class _Unchanged:
    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Any = _Unchanged()
"""Default of the arguments of `with_...`: the field keeps its value."""


def _fields_of(section: str, quantization: str | None = None) -> Callable[[Method], Method]:
    """Build a method from its signature: keyword arguments become fields of `section`.

    An adapter starts from the defaults, and other sections from those of the recipe. A keyword that
    is not in the signature is passed on, so that the section reports it with "did you mean".
    """

    def make(method: Method) -> Method:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def changed(self: "Changes", *args: Any, **fields: Any) -> Any:
            known = {name: fields[name] for name in fields if name in signature.parameters}
            bound = signature.bind_partial(self, *args, **known).arguments
            fields |= {name: bound[name] for name in bound if name != "self"}
            fields = {name: value for name, value in fields.items() if value is not UNCHANGED}
            if section == "adapter":
                changes = {section: self.adapter_kind(**fields)}
            else:
                changes = {section: dataclasses.replace(getattr(self, section), **fields)}
            if quantization is not None:
                changes["model"] = dataclasses.replace(self.model, quantization=quantization)
            return dataclasses.replace(self, **changes)

        return cast(Method, changed)

    return make


class Changes:
    """The methods of a recipe that return a modified copy."""

    adapter_kind: ClassVar[type]
    """Class of the adapter section."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
        model: Model
        eval_data: tuple[Data, ...]

    def with_model(self, model: "Model") -> Self:
        """Change the model."""
        return dataclasses.replace(self, model=model)

    def with_data(self, *data: "Data", eval_data: "tuple[Data, ...] | Data" = ()) -> Self:
        """Train on these sources; `eval_data`, if given, replaces the evaluation sources."""
        held_out = eval_data if isinstance(eval_data, tuple) else (eval_data,)
        return dataclasses.replace(self, data=data, eval_data=held_out or self.eval_data)

    @_fields_of("adapter")
    def with_lora(
        self,
        r: int = 16,
        *,
        alpha: float | None = None,
        dropout: float = 0.0,
        targets: str | tuple[str, ...] = "all-linear",
        target_parameters: tuple[str, ...] = (),
        modules_to_save: tuple[str, ...] = (),
        trainable_token_indices: tuple[int | str, ...] | dict[str, tuple[int | str, ...]] = (),
        use_dora: bool = False,
        use_rslora: bool = False,
        init_lora_weights: bool | str = True,
        exclude_modules: str | tuple[str, ...] = (),
        layers_to_transform: tuple[int, ...] = (),
        rank_pattern: dict[str, int] = {},  # noqa: B006 - never read: the signature is the method
        alpha_pattern: dict[str, float] = {},  # noqa: B006
    ) -> Self:
        """Train a new LoRA adapter; see `LoRA` for the fields.

        Raises:
            FinetuneError: an unknown field or a wrong value.
        """
        ...

    @_fields_of("adapter", quantization="nf4")
    def with_qlora(
        self,
        r: int = 16,
        *,
        alpha: float | None = None,
        dropout: float = 0.0,
        targets: str | tuple[str, ...] = "all-linear",
        target_parameters: tuple[str, ...] = (),
        modules_to_save: tuple[str, ...] = (),
        trainable_token_indices: tuple[int | str, ...] | dict[str, tuple[int | str, ...]] = (),
        use_dora: bool = False,
        use_rslora: bool = False,
        init_lora_weights: bool | str = True,
        exclude_modules: str | tuple[str, ...] = (),
        layers_to_transform: tuple[int, ...] = (),
        rank_pattern: dict[str, int] = {},  # noqa: B006
        alpha_pattern: dict[str, float] = {},  # noqa: B006
    ) -> Self:
        """Train a new LoRA adapter on a base in NF4 with double quantization (arXiv:2305.14314).

        Raises:
            FinetuneError: an unknown field or a wrong value.
        """
        ...

    def with_full_weights(self) -> Self:
        """Train all weights, without an adapter or quantization."""
        model = dataclasses.replace(self.model, quantization="none")
        return dataclasses.replace(self, adapter=None, model=model)

    @_fields_of("batch")
    def with_batch(
        self,
        *,
        rows: int = UNCHANGED,
        micro_rows: int = UNCHANGED,
        max_length: int = UNCHANGED,
        overlong: Literal["error", "drop", "truncate", "split"] = UNCHANGED,
        packing: bool = UNCHANGED,
        padding_free: bool | Literal["auto"] = UNCHANGED,
        share_prompts: bool | Literal["auto"] = UNCHANGED,
        micro_tokens: int | None = UNCHANGED,
    ) -> Self:
        """Change fields of the batch; see `Batch`.

        Raises:
            FinetuneError: an unknown field or a wrong value.
        """
        ...

    @_fields_of("optim")
    def with_optim(
        self,
        *,
        name: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "muon"] = UNCHANGED,
        lr: float = UNCHANGED,
        lr_scaling: Literal["none", "linear", "sqrt"] = UNCHANGED,
        schedule: Literal["constant", "linear", "cosine"] = UNCHANGED,
        warmup: float = UNCHANGED,
        min_lr: float = UNCHANGED,
        weight_decay: float = UNCHANGED,
        betas: tuple[float, float] = UNCHANGED,
        eps: float = UNCHANGED,
        max_grad_norm: float | None = UNCHANGED,
        on_nonfinite: Literal["stop", "skip"] = UNCHANGED,
        max_skipped: int = UNCHANGED,
    ) -> Self:
        """Change fields of the optimizer and its schedule; see `Optim`.

        Raises:
            FinetuneError: an unknown field or a wrong value.
        """
        ...

    @_fields_of("kernels")
    def with_kernels(
        self,
        *,
        head: Literal["chunked", "whole"] = UNCHANGED,
        lora: Literal["grouped", "separate"] = UNCHANGED,
        norm: Literal["fused", "plain"] = UNCHANGED,
        activation: Literal["fused", "plain"] = UNCHANGED,
        rotary: Literal["fused", "plain"] = UNCHANGED,
        blocks: Literal["eager", "compiled"] = UNCHANGED,
        pointwise: Literal["auto", "compiled", "eager"] = UNCHANGED,
        allocator: Literal["auto", "pooled", "plain"] = UNCHANGED,
    ) -> Self:
        """Change how the computation is implemented; see `Kernels`.

        Raises:
            FinetuneError: an unknown field or a wrong value.
        """
        ...

    @_fields_of("evaluation")
    def with_evaluation(
        self,
        *,
        every: int | None = UNCHANGED,
        micro_rows: int | None = UNCHANGED,
        best: str = UNCHANGED,
        patience: int | None = UNCHANGED,
        metrics: tuple[
            Literal["exact", "number", "labels", "f1", "rouge", "bleu", "chrf", "json", "tools"],
            ...,
        ] = UNCHANGED,
        metric_rows: int = UNCHANGED,
        max_new_tokens: int = UNCHANGED,
    ) -> Self:
        """Change when the model is evaluated; see `Evaluation`.

        Raises:
            FinetuneError: an unknown field or a wrong value.
        """
        ...

    @_fields_of("saving")
    def with_saving(
        self,
        *,
        every: int | None = UNCHANGED,
        keep: int = UNCHANGED,
        background: bool = UNCHANGED,
        rehearse: bool = UNCHANGED,
    ) -> Self:
        """Change when checkpoints are written; see `Saving`.

        Raises:
            FinetuneError: an unknown field or a wrong value.
        """
        ...

    def with_epochs(self, epochs: float) -> Self:
        """Train for a number of passes over the data instead of a number of steps."""
        return dataclasses.replace(self, epochs=epochs, max_steps=None)

    def with_steps(self, max_steps: int) -> Self:
        """Train for a number of optimizer steps."""
        return dataclasses.replace(self, max_steps=max_steps)

    def with_seed(self, seed: int) -> Self:
        """Change the seed of initial weights, data order and dropout."""
        return dataclasses.replace(self, seed=seed)

    def with_backend(self, name: str) -> Self:
        """Change the default backend of `finetune launch`."""
        return dataclasses.replace(self, backend=name)
