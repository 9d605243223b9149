"""Read the settings of a cluster: `clusters/NAME.yaml`, with `cluster.key=value` overrides."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import to_jsonable_python

from finetune import catalog
from finetune.errors import Checked, FinetuneError, did_you_mean, problems, reading, refuse
from finetune.process.yaml_text import read_yaml
from finetune.recipe.field_types import STRICT, Positive, Text

Above0 = Annotated[float, Field(gt=0)]
OVERRIDE = "cluster."


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Cluster(metaclass=Checked):
    """Machines of a cluster, and how a job is started on them; each launcher adds its settings."""

    nodes: Positive = 1
    """Machines of a job."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of a node; 0 to train on its CPUs."""
    gpu: Text | None = None
    """Name of the GPU for the plan, such as H100-80."""
    cores: Positive | None = None
    """CPU cores of a node for the job."""
    network: Text | None = None
    """Network between the nodes for the plan, such as ib400."""
    host_ram: Above0 | None = None
    """GB of memory of a node, for the plan."""
    price: Above0 | None = None
    """Price of a GPU (a node, without GPUs) and hour, for the plan and the report."""
    environment: dict[str, str] = Field(default_factory=dict[str, str])
    """Environment variables of the job."""
    command: Text | None = None
    """How `finetune` is called on the machines; by default as here, in a container `finetune`."""
    attempts: Positive = 10
    """Starts in a row without a new checkpoint, after which the job is not started again."""


Settings = TypeVar("Settings", bound=Cluster)


def folders(recipe: Path) -> list[Path]:
    """Folders to search for clusters: beside the recipe, here, and the user's."""
    user = Path.home() / ".config" / "finetune"
    return [folder / "clusters" for folder in (recipe.parent, Path(), user)]


def find(name: str, recipe: Path) -> Path:
    """The file of a cluster, by name or path; raises FinetuneError if it does not exist."""
    if name.endswith((".yaml", ".yml")):
        known = {name: Path(name)} if Path(name).is_file() else {}
    else:
        files = [file for folder in folders(recipe) for file in sorted(folder.glob("*.yaml"))]
        known = {file.stem: file for file in reversed(files)}
    if name in known:
        return known[name]
    places = ", ".join(map(str, folders(recipe)))
    listed = f"known are {', '.join(known)}" if known else f"there is none in {places}"
    raise FinetuneError(f"--cluster {name}: no such file{did_you_mean(name, known)}; {listed}")


def split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The `key=value` words of a recipe, and those of a cluster without their prefix."""
    own = [word.removeprefix(OVERRIDE) for word in overrides if word.startswith(OVERRIDE)]
    return [word for word in overrides if not word.startswith(OVERRIDE)], own


def load(kind: type[Settings], path: Path | None, overrides: Sequence[str]) -> Settings:
    """Read a cluster strictly: defaults, then the file, then the overrides.

    Args:
        kind: settings of the launcher.
        path: the file; None for the defaults.

    Raises:
        FinetuneError: contains every problem of the file and the overrides.
    """
    where, read = str(path or "cluster"), {}
    if path is not None:
        with reading(f"{path}: cannot be read"):
            read = read_yaml(path.read_text(encoding="utf-8"), catalog.ExactNumbers) or {}
    if not isinstance(read, dict):
        raise FinetuneError(f"{where}: expected keys and values, got {type(read).__name__}")
    fields = to_jsonable_python(read)
    wrong = [f"{OVERRIDE}{problem}" for pair in overrides
             if (problem := catalog.assign(fields, kind, pair))]  # fmt: skip
    try:
        made = TypeAdapter(kind).validate_python(fields)
    except ValidationError as error:
        raise FinetuneError(*wrong, *problems(error, kind, where)) from None
    refuse(wrong)
    return made
