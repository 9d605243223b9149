"""The command `finetune import`."""

from pathlib import Path

from finetune.importers import explain, import_recipe, recipe_file


def run(file: Path, output: str | None, processes: int) -> int:
    """Write the recipe of a file, and print the outcome of each of its keys."""
    name = output or file.stem
    path = recipe_file.path_of(name)
    recipe, job, toolkit = import_recipe(file, processes)
    lines = explain(job)
    recipe_file.write(path, recipe, f"{path.stem}, from {file.name} of {toolkit}.", lines)
    print("\n".join(lines))
    print(f"wrote {path}; run `finetune plan {name}` to check it")
    return 0
