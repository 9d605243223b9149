"""The `with_...` methods of a recipe, each of which returns a modified copy.

A method of a section takes the section itself, or fields of it as keywords; a type checker reads
their names and types from the section's constructor.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, ParamSpec, Self, TypeVar, cast, overload

from finetune.recipe.sections import Batch, Data, Evaluation, Kernels, LoRA, Model, Optim, Saving

Fields = ParamSpec("Fields")
Section = TypeVar("Section")
Changed = TypeVar("Changed")


class Change(Generic[Fields, Section, Changed]):
    """A method of a recipe for one section, as a type checker sees it."""

    @overload
    def __call__(self, section: Section, /) -> Changed: ...
    @overload
    def __call__(self, *args: Fields.args, **fields: Fields.kwargs) -> Changed: ...
    def __call__(self, *args: Any, **fields: Any) -> Any: ...


class Unbound(Generic[Fields, Section]):
    """Such a method in its class."""

    def __get__(self, recipe: Changed, owner: type) -> Change[Fields, Section, Changed]: ...


def change_of(
    name: str, section: Callable[Fields, Section], about: str, **model: Any
) -> Unbound[Fields, Section]:
    """Make the method that changes the section `name` of a recipe; `about` is its docstring.

    Fields that are not given stay, but an adapter starts from the defaults. `model` has fields of
    the model to change as well.
    """
    kind = cast(type, section)

    def change(self: "Changes", *args: Any, **fields: Any) -> "Changes":
        if args and isinstance(args[0], kind):
            old: Any = args[0]
        else:
            old = kind() if name == "adapter" else getattr(self, name)
            fields |= zip((field.name for field in dataclasses.fields(kind)), args, strict=False)
        changes = {name: dataclasses.replace(old, **fields)}
        if model:
            changes["model"] = dataclasses.replace(self.model, **model)
        return dataclasses.replace(self, **changes)

    change.__doc__ = f"{about}\n\nRaises:\n    FinetuneError: an unknown field or a wrong value."
    return cast(Unbound[Fields, Section], change)


class Changes:
    """The methods of a recipe that return a modified copy."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
        model: Model
        eval_data: tuple[Data, ...]

    def with_model(self, model: Model) -> Self:
        """Change the model."""
        return dataclasses.replace(self, model=model)

    def with_data(self, *data: Data, eval_data: tuple[Data, ...] | Data = ()) -> Self:
        """Train on these sources; `eval_data`, if given, replaces the evaluation sources."""
        held_out = eval_data if isinstance(eval_data, tuple) else (eval_data,)
        return dataclasses.replace(self, data=data, eval_data=held_out or self.eval_data)

    with_lora = change_of("adapter", LoRA, "Train a new LoRA adapter; see `LoRA` for the fields.")
    with_qlora = change_of(
        "adapter",
        LoRA,
        "Train a new LoRA adapter on a base in NF4 with double quantization (arXiv:2305.14314).",
        quantization="nf4",
    )

    def with_full_weights(self) -> Self:
        """Train all weights, without an adapter or quantization."""
        model = dataclasses.replace(self.model, quantization="none")
        return dataclasses.replace(self, adapter=None, model=model)

    with_batch = change_of("batch", Batch, "Change fields of the batch; see `Batch`.")
    with_optim = change_of(
        "optim", Optim, "Change fields of the optimizer and its schedule; see `Optim`."
    )
    with_kernels = change_of(
        "kernels", Kernels, "Change how the computation is implemented; see `Kernels`."
    )
    with_evaluation = change_of(
        "evaluation", Evaluation, "Change when the model is evaluated; see `Evaluation`."
    )
    with_saving = change_of("saving", Saving, "Change when checkpoints are written; see `Saving`.")

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
