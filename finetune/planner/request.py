"""What a rule is asked about: a recipe on a backend, with the config of its model read once."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from finetune.backend import Backend
from finetune.planner.engines import TRAITS, Traits
from finetune.planner.mesh import Mesh, mesh_of
from finetune.planner.padding import Padding, padding
from finetune.planner.shapes.config_files import decoder_fields, fields_of
from finetune.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Request:
    """A recipe on a backend with a number of processes, before it is known whether it can run."""

    recipe: Recipe
    backend: Backend
    processes: int
    fields: Mapping[str, Any]
    """The model's config; empty if it is not known yet."""

    @property
    def kind(self) -> str | None:
        """The model type; None if it is not known yet."""
        return self.fields.get("model_type")

    @property
    def traits(self) -> Traits:
        return TRAITS[self.backend.engine]

    @property
    def mesh(self) -> Mesh:
        return mesh_of(self.backend, max(1, self.processes))

    @property
    def padding(self) -> Padding:
        return padding(self.recipe, decoder_fields(self.fields))

    @property
    def holds_out(self) -> bool:
        """Whether rows are evaluated."""
        return bool(self.recipe.eval_data) or self.recipe.eval_rows is not None

    @property
    def gathers_by_module(self) -> bool:
        """Whether a weight is complete only while its own module runs (ZeRO-3)."""
        return self.traits.for_own_module and self.backend.shard == "params"


Rule = Callable[[Request], Iterator[str]]
"""A check of a request, whose docstring is its row of docs/refusals.md: `field: why; instead.`"""


def requested(recipe: Recipe, backend: Backend, processes: int) -> Request:
    """The request of a recipe, with the config of its model as far as this machine knows it."""
    return Request(recipe, backend, processes, fields_of(recipe))
