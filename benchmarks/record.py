"""Write a result as JSON and as a Markdown table, with machine, versions and command."""

import dataclasses
import os
from pathlib import Path
from typing import Any, Self

import psutil
import torch

from finetune.runs import units
from finetune.runs.environment import environment
from finetune.runs.run import write_json

ROOT = Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one benchmark."""

    title: str
    how: str
    """Description of the workload and the timing, in a few sentences."""
    values: dict[str, Any]
    """Values for the JSON file, with their unit in the name."""
    table: list[list[str]]
    """Cells of the Markdown table; the first row is the header."""
    remarks: list[str]
    """Remarks, such as what was not measured and why."""


@dataclasses.dataclass(frozen=True)
class Circumstances:
    """Machine, versions and command, recorded before the first measurement."""

    values: dict[str, Any]

    @classmethod
    def now(cls, command: str, note: str | None) -> Self:
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        made = environment([torch.cuda.get_device_name(index) for index in range(found)])
        made |= {
            "command": command,
            "processor": environment()["devices"][0],
            "cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "load_average": round(os.getloadavg()[0], 2),
            "note": note,
        }
        return cls(made)

    def lines(self) -> list[str]:
        values = self.values
        shown = ("torch", "transformers", "accelerate", "peft", "deepspeed")
        versions = values["versions"]
        listed = ", ".join(f"{name} {versions[name]}" for name in shown if name in versions)
        machine = dict.fromkeys([*values["devices"], values["processor"]])  # without duplicates
        lines = [
            f"- machine: {', '.join(machine)}, {units.size(values['memory_bytes'])} of memory",
            f"- load average before: {values['load_average']} on {values['cores']} cores",
            f"- command: `{values['command']}`",
            f"- commit {values['commit']}, {values['started']}",
            f"- Python {values['python']}, {listed}",
        ]
        return [*lines, f"- {values['note']}"] if values["note"] else lines


def write(folder: Path, name: str, result: Result, circumstances: Circumstances) -> Path:
    """Write `name.json` and `name.md`; returns the path of the latter."""
    write_json(folder / f"{name}.json", {**circumstances.values, "results": result.values})
    head, *rows = result.table
    rule = ["---", *["---:"] * (len(head) - 1)]
    table = [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]
    remarks = [f"- {remark}" for remark in result.remarks]
    blocks = [[f"# {result.title}"], [result.how], table, remarks, circumstances.lines()]
    page = folder / f"{name}.md"
    page.write_text("\n\n".join("\n".join(block) for block in blocks if block) + "\n")
    return page
