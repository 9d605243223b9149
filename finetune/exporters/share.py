"""Share a result: upload an export to the hub, or bundle the record of a run into one file."""

import os
import re
import zipfile
from pathlib import Path

from finetune.errors import FinetuneError, reading, refuse
from finetune.runs.run import Run, replacing

RECORD = (
    "recipe.json", "environment.json", "data.json", "realised.json", "metrics.jsonl",
    "loss.png", "final/README.md",
)  # fmt: skip
"""Files of a run without weights and without data."""

TEXTS = (".json", ".md", ".jinja", ".txt", "Modelfile")
LOCAL_PATH = re.compile(r"(?<![\w.:/])/(?:[\w.+-]+/)+[\w.+-]+")


def check_name(name: str) -> None:
    """Reject a name that the hub would reject, before anything is written.

    Raises:
        FinetuneError: the name is not valid for a repository.
    """
    from huggingface_hub.utils import validate_repo_id

    with reading(f"--push: got '{name}', expected OWNER/NAME"):
        validate_repo_id(name)


def push(folder: Path, name: str, private: bool = True) -> str:
    """Upload the folder of an export to a hub repository; returns its URL.

    Args:
        folder: Folder of an export.
        name: Repository `owner/name`, which is created if it does not exist.
        private: Whether a new repository is private.

    Raises:
        FinetuneError: a file contains a local path, or nothing could be uploaded.
    """
    from huggingface_hub import HfApi

    named = local_paths(folder)
    refuse(f"--push: {each}; nothing was uploaded" for each in named)
    api = HfApi()
    with reading(f"--push {name}: {folder} is complete, but could not be uploaded"):
        made = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder)
    return str(made)


def local_paths(folder: Path) -> list[str]:
    """Messages about files of an export that contain an existing local path."""
    found: list[str] = []
    for path in sorted(folder.rglob("*")):
        if path.name.endswith(TEXTS) and path.name != "tokenizer.json":
            text = path.read_text(encoding="utf-8", errors="replace")
            local = sorted({each for each in LOCAL_PATH.findall(text) if os.path.exists(each)})
            found += [f"{path.name} names {each}, a path of this machine" for each in local]
    return found


def bundle(run: Run, to: Path) -> Path:
    """Write the record of a run as one zip file, without weights, data and answers.

    Raises:
        FinetuneError: the file exists.
    """
    if to.exists():
        raise FinetuneError(f"--bundle {to}: exists; name another file")
    files = [run.root / name for name in RECORD]
    files += sorted(run.root.glob("eval/*/results.json"))
    with replacing(to) as scratch, zipfile.ZipFile(scratch, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            if path.is_file():
                archive.write(path, path.relative_to(run.root))
    return to
