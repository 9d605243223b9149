"""Keep a run on an object store: a local run directory whose files are copied when complete.

    s3://bucket/run/...        the files of a run directory, as in `finetune.runs.run`
    s3://bucket/run/run.lock   the process that trains; written only if it is not there

The local directory is in the cache. A checkpoint is complete with its manifest, which is copied
after its files and the metrics up to it, and removed before them; so whatever ends the copying, the
store has the run as it was at a checkpoint. Addresses are those of fsspec: s3://, gs://, hf://, ...

Each of several machines has a local directory of its own. Ranks elsewhere write their parts of a
checkpoint to the store themselves; machine 0, whose directory is that of the run, completes it.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from finetune.cache import cache
from finetune.errors import FinetuneError, TrainingFailure
from finetune.runs.addresses import asking, file_system
from finetune.runs.run import Run

STALE_SECONDS = 75.0
"""A lock that has not changed for this long belongs to a process that has ended."""
LOCK = "run.lock"
HERE = ".store.json"
"""In the local directory: the address of its store, and which of how many machines this is."""
PART = re.compile(r"rank-(\d+)-of-(\d+)\.safetensors")
"""What a rank writes of a checkpoint; machine 0 has the first ranks."""
BEFORE_CHECKPOINTS = "recipe.json", "plan.json", "data.json", "environment.json", "metrics.jsonl"
"""Files that a checkpoint needs to be continued; its manifest follows them."""
HIDDEN = re.compile(r"(^|/)(\.|$)")
"""Names of what is not a file of a run: also those of folders, the address itself among them."""
LOCAL = {LOCK, HERE, "offload", "flight_records", "starting_adapter.json"}
"""Names of a run directory that mean something only on the machine that wrote them."""


class Store:
    """The files of a run at an address, and their local directory.

    Attributes:
        machine: which of the machines of the job this is; only machine 0 has the whole run.
        machines: how many there are.
    """

    def __init__(self, address: str, machine: int = 0, machines: int = 1) -> None:
        """Open an address without reading it.

        Raises:
            FinetuneError: its library is missing, or it has no bucket and name.
        """
        self.address = address.rstrip("/")
        self.files, root = file_system(self.address)
        self.root = root.rstrip("/")
        if "/" not in self.root.strip("/"):
            raise FinetuneError(f"{self.address}: give the run a name below it, such as .../my-run")
        self.machine, self.machines = machine, machines
        name = _folder_name(self.address) + (f".machine-{machine}" if machine else "")
        self.local = Run(cache("runs") / name)
        self._copied: dict[str, tuple[int, int]] = {}
        """Size and time of the local files that the store has, by name."""

    # Single objects.

    def read(self, name: str) -> bytes | None:
        """An object below the address; None if it is not there."""
        missing = FileNotFoundError
        with contextlib.suppress(missing), asking(self.address, f"{name} cannot be read", missing):
            return self.files.cat_file(f"{self.root}/{name}")
        return None

    def write(self, name: str, content: bytes, new: bool = False) -> bool:
        """Write an object; with `new`, only if it is not there. Returns whether it was written."""
        there = FileExistsError
        with contextlib.suppress(there), asking(self.address, f"{name} cannot be written", there):
            self._folder_of(name)
            mode = {"mode": "create"} if new else {}
            self.files.pipe_file(f"{self.root}/{name}", content, **mode)
            return True
        return False

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            missing = FileNotFoundError
            with (
                contextlib.suppress(missing),
                asking(self.address, f"{name} cannot be removed", missing),
            ):
                self.files.rm_file(f"{self.root}/{name}")

    def sizes(self) -> dict[str, int]:
        """Bytes of each object below the address, by name, but for hidden ones.

        Those are of a moment: what `try_out` of another machine writes, or a file being copied.
        """
        found = dict[str, Any]()
        missing = FileNotFoundError
        with contextlib.suppress(missing), asking(self.address, "cannot be listed", missing):
            self.files.invalidate_cache()
            found = self.files.find(self.root, detail=True)
        start = len(self.files._strip_protocol(self.root)) + 1
        sizes = {path[start:]: each["size"] for path, each in found.items()}
        return {name: size for name, size in sizes.items() if not HIDDEN.search(name)}

    def try_out(self) -> None:
        """Write, read and remove an object, before anything is computed for the store.

        Raises:
            FinetuneError: one of the three is not possible.
        """
        name, content = f".{secrets.token_hex(8)}", secrets.token_bytes(16)
        self.write(name, content)
        try:
            if self.read(name) != content:
                raise FinetuneError(f"{self.address}: returns other bytes than were written there")
        finally:
            self.remove([name])

    # The whole run.

    def fetch_to_train(self, resume: bool | str) -> None:
        """Bring the local directory to where the run in the store is, if it is behind.

        Raises:
            FinetuneError: `resume` is False, and the store has a run.
        """
        there, local = self.sizes(), self.local
        newest = max(steps_of(there), default=0)
        if newest and resume is False:
            raise FinetuneError(
                f"{self.address}: contains a run up to step {newest}; continue it with --resume, "
                "or choose another --output"
            )
        if self.machine:
            shutil.rmtree(local.root, ignore_errors=True)
            # What says whether the run is complete; `fetch_state` brings the rest.
            about = {name for name in there if "/" not in name} | {"final/README.md"}
            about |= {f"checkpoints/{local.checkpoint(newest).name}/manifest.json"}
            for name in (about & there.keys()) - LOCAL:
                self._fetch_file(name, local.root / name, there[name])
        elif "recipe.json" not in there and local.recipe.exists():
            # Another run of this name, which somebody has removed from the store.
            local.root.rename(local.root.with_name(f"{local.root.name}-{secrets.token_hex(4)}"))
        elif newest > (local.newest() or 0):
            kept = {newest, self._best()}
            self._fetch(there, kept)
        else:
            self._note_copied(there)
            if self.machines > 1 and (local.newest() or 0) > newest:
                self.push(prune=False)  # the other machines read the newest from there
        self._mark()

    def fetch_to_read(self, step: int | None = None) -> None:
        """Copy a result to the local directory; see `opened` and `bring`."""
        there = self.sizes()
        if not there:
            raise FinetuneError(f"{self.address}: there is no run")
        wanted = {step} if step is not None else set[int | None]()
        if not any(name.startswith("final/") for name in there) and step is None:
            wanted = {max(steps_of(there), default=None), self._best()}
        self._fetch(there, wanted)
        if not (self.local.root / HERE).exists():  # a training may use it
            self._mark()

    def fetch_state(self, step: int) -> None:
        """Copy what ranks read of a checkpoint to the local directory, and drop all others.

        Raises:
            FinetuneError: the store does not have the checkpoint.
        """
        there = self.sizes()
        if step not in steps_of(there):
            raise FinetuneError(f"{self.address}: the checkpoint of step {step} is not complete")
        shutil.rmtree(self.local.checkpoints, ignore_errors=True)
        for name in self._files_of(step, there):
            if PurePosixPath(name).parts[2] in ("state", "manifest.json"):
                self._fetch_file(name, self.local.root / name, there[name])

    def push_part(self, file: Path) -> None:
        """Write this machine's part of a checkpoint that is not complete."""
        self._push(file, self._part(file))

    def _files_of(self, step: int, there: Iterable[str]) -> list[str]:
        """Names of the files of a complete checkpoint, without parts that an earlier start left."""
        start = f"checkpoints/{self.local.checkpoint(step).name}/"
        mine = [name for name in there if name.startswith(start)]
        with contextlib.suppress(ValueError, LookupError, TypeError):  # a damaged manifest
            known = json.loads(self.read(f"{start}manifest.json") or b"")["files"]
            return [n for n in mine if (inside := n.removeprefix(start)) in known
                    or inside == "manifest.json"]  # fmt: skip
        return mine

    def fetch_parts(self, files: Iterable[Path]) -> None:
        """Copy parts of a checkpoint that other machines wrote to where they would be here."""
        there = self.sizes()
        for file in files:
            if not file.exists():
                name = self._part(file)
                self._fetch_file(name, file, there.get(name, 0))

    def _part(self, file: Path) -> str:
        """The name in the store of a part in the folder `.step-N.partial`."""
        name = file.relative_to(self.local.root).as_posix()
        return name.replace("/.step-", "/step-").replace(".partial/", "/")

    def _mark(self) -> None:
        self.local.root.mkdir(parents=True, exist_ok=True)
        known = {"address": self.address, "machine": self.machine, "machines": self.machines}
        (self.local.root / HERE).write_text(json.dumps(known))

    def push(self, prune: bool = True) -> None:
        """Copy what is new or has changed; `prune` removes the checkpoints that are not here.

        Raises:
            FinetuneError: something could not be copied; it is tried again by the next call.
        """
        steps, there = self.local.steps(), self.sizes()
        for step in steps:
            folder = self.local.checkpoint(step)
            files = sorted(self._inside(folder), key=lambda each: each.name == "manifest.json")
            for file in files:
                if file.name == "manifest.json":  # with these, it is a run
                    for needed in BEFORE_CHECKPOINTS:
                        if (self.local.root / needed).is_file():
                            self._push(self.local.root / needed)
                if not self._of_another_machine(file, there):
                    self._push(file)
        for file in self._inside(self.local.root):
            if file.relative_to(self.local.root).parts[0] != "checkpoints":
                self._push(file)
        # Other machines write the parts of a step that is not complete here.
        below = math.inf if self.machines == 1 else max(steps, default=0)
        gone = [
            name
            for name in (there if prune else ())
            if (old := step_of(name)) is not None and old not in steps and old < below
        ]
        self.remove(sorted(gone, key=lambda name: not name.endswith("/manifest.json")))
        for name in gone:
            self._copied.pop(name, None)

    def _of_another_machine(self, file: Path, there: dict[str, int]) -> bool:
        """Whether another machine wrote a file to the store, from where this one has it."""
        part = PART.fullmatch(file.name)
        name = file.relative_to(self.local.root).as_posix()
        return (
            part is not None
            and int(part[1]) >= int(part[2]) // self.machines
            and there.get(name) == file.stat().st_size
        )

    def _push(self, file: Path, name: str | None = None) -> None:
        name = name or file.relative_to(self.local.root).as_posix()
        # A file that was removed for a newer checkpoint cannot be written either.
        with asking(self.address, f"{name} cannot be written"):
            about = file.stat()
            now = about.st_size, about.st_mtime_ns
            if self._copied.get(name) == now:
                return
            self._folder_of(name)
            folder, _, last = f"{self.root}/{name}".rpartition("/")
            if self._is_folder:  # not whole at once, as an object of a bucket is
                scratch = f"{folder}/.{last}.{secrets.token_hex(4)}"
                self.files.put_file(str(file), scratch)
                os.replace(scratch, f"{folder}/{last}")
            else:
                self.files.put_file(str(file), f"{folder}/{last}")
            self._copied[name] = now

    def _fetch(self, there: dict[str, int], steps: set[int | None]) -> None:
        """Copy all files but those of other checkpoints; a checkpoint appears when complete."""
        for name in there:
            if name.split("/")[0] not in LOCAL and step_of(name) is None:
                self._fetch_file(name, self.local.root / name, there[name])
        for step in sorted(steps - {None}, key=lambda each: each or 0):
            folder = self.local.checkpoint(step or 0)
            partial = folder.with_name(f".{folder.name}.partial")
            mine = self._files_of(step or 0, there)
            if (folder / "manifest.json").exists() or not mine:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            for name in mine:
                inside = PurePosixPath(name).relative_to(f"checkpoints/{folder.name}")
                self._fetch_file(name, partial / inside, there[name])
            partial.rename(folder)
        self._note_copied(there)

    def _fetch_file(self, name: str, path: Path, size: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            for _ in range(5):  # a file such as metrics may be written again meanwhile
                with asking(self.address, f"{name} cannot be read"):
                    self.files.get_file(f"{self.root}/{name}", str(scratch))
                    if scratch.stat().st_size == size:
                        scratch.replace(path)
                        return
                    size = self.files.size(f"{self.root}/{name}")
            raise FinetuneError(f"{self.address}/{name}: changes while it is read; try again")
        finally:
            scratch.unlink(missing_ok=True)

    def _note_copied(self, there: dict[str, int]) -> None:
        """Files of complete checkpoints that the store has are not copied again."""
        for step in self.local.steps():
            folder = self.local.checkpoint(step)
            known = (folder / "manifest.json").read_bytes()
            if known != self.read(f"checkpoints/{folder.name}/manifest.json"):
                continue
            for file in self._inside(folder):
                name, about = file.relative_to(self.local.root).as_posix(), file.stat()
                if there.get(name) == about.st_size:
                    self._copied[name] = about.st_size, about.st_mtime_ns

    def _best(self) -> int | None:
        content = self.read("best.json")
        return None if content is None else json.loads(content)["step"]

    def _inside(self, folder: Path) -> list[Path]:
        return [
            file
            for file in sorted(folder.rglob("*"))
            if file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(self.local.root).parts)
            and file.relative_to(self.local.root).parts[0] not in LOCAL
        ]

    @property
    def _is_folder(self) -> bool:
        return "file" in self.files.protocol

    def _folder_of(self, name: str) -> None:
        if self._is_folder:  # a bucket would be created if it is missing
            self.files.makedirs(f"{self.root}/{name}".rpartition("/")[0], exist_ok=True)

    # The lock.

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the run, which other machines see.

        Raises:
            FinetuneError: another process holds it.
        """
        self.holder = {"process": os.getpid(), "host": socket.gethostname()}
        self.holder |= {"token": secrets.token_hex(8)}
        self.beats = 0
        # An answer that is lost on the way is asked for again, and says that the lock is there.
        if not (self.write(LOCK, self._lock(), new=True) or self.is_mine()):
            self._take_over()
        try:
            yield
        finally:
            with contextlib.suppress(FinetuneError):
                if self.is_mine():
                    self.remove([LOCK])

    def is_mine(self) -> bool:
        return self.holder["token"].encode() in (self.read(LOCK) or b"")

    def beat(self) -> None:
        """Show that this process lives.

        Raises:
            TrainingFailure: another one has taken the lock, because this one stood still.
        """
        if not self.is_mine():
            raise TrainingFailure(f"{self.address}: another process trains there now")
        self.beats += 1
        self.write(LOCK, self._lock())

    def _lock(self) -> bytes:
        return json.dumps({**self.holder, "beats": self.beats}).encode()

    def _take_over(self) -> None:
        """Replace the lock of a process that has ended; wait for its beats if it was elsewhere."""
        first = self.read(LOCK)
        known = json.loads(first) if first else {}
        if known.get("host") == self.holder["host"] and is_alive(known["process"]):
            raise FinetuneError(self._held(known))
        until = time.monotonic() + STALE_SECONDS
        elsewhere = known.get("host") not in (None, self.holder["host"])
        if elsewhere:
            print(f"{self.address}: locked; waiting for {STALE_SECONDS:.0f} s ...", flush=True)
        while elsewhere and time.monotonic() < until:
            time.sleep(2)
            if (now := self.read(LOCK)) is None:
                break
            if now != first:
                raise FinetuneError(self._held(known))
        self.write(LOCK, self._lock())
        time.sleep(1)  # of several that take it over, the last one has it
        if not self.is_mine():
            raise FinetuneError(self._held(json.loads(self.read(LOCK) or b"{}")))

    def _held(self, known: dict[str, Any]) -> str:
        return (
            f"{self.address}: process {known.get('process')} on {known.get('host')} trains there; "
            "wait for it, or choose another --output"
        )


def step_of(name: str) -> int | None:
    """The step of a file of a checkpoint, by its name in the store."""
    parts = name.split("/")
    inside = len(parts) > 2 and parts[0] == "checkpoints" and parts[1].startswith("step-")
    return int(parts[1].removeprefix("step-")) if inside else None


def steps_of(there: Iterable[str]) -> list[int]:
    """Steps of the complete checkpoints of a store."""
    manifests = (name for name in there if name.endswith("/manifest.json"))
    return sorted(step for name in manifests if (step := step_of(name)) is not None)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _folder_name(address: str) -> str:
    return f"{Path(address).name}-{hashlib.sha256(address.encode()).hexdigest()[:12]}"
