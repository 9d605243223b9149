"""Write `docs/refusals.md` from the lists of checks: `python -m tests.refusals_page`.

The first line of a check's docstring is its row: `fields: reason; what to write.`
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from finetune.checks import files, machine, model, request, start
from finetune.distributed import device
from finetune.models import starting_adapter, starting_run
from finetune.planner import data_rules, mesh_rules, rules

PAGE = Path(__file__).parent.parent / "docs/refusals.md"
MOMENTS: dict[str, Iterable[Callable[..., Any]]] = {
    "The request, before anything is read": (
        *data_rules.RULES, *rules.RULES, *mesh_rules.OF_MODEL, *mesh_rules.RULES, request.misnamed,
    ),
    "What it names": (
        *files.FILES, files.formats, starting_run.resolved, starting_adapter.unfit,
        starting_adapter.contradictions, *files.NEEDED,
    ),
    "This machine": (device.problems, *machine.MACHINE),
    "The loaded model": (model.context, model.finite_weights),
    "The started engine": start.START.values(),
}  # fmt: skip
COLLECTORS = {rules.of_data, rules.divided, mesh_rules.of_config, start.memory, start.start}
"""Members of the lists that ask other lists, or report a line and refuse nothing."""
ROW = re.compile(r"(?P<fields>[^:]+): (?P<reason>.+); (?P<instead>[^;]+)\.")


def row(check: Callable[..., Any]) -> list[str]:
    first = (check.__doc__ or "").split("\n")[0]
    found = ROW.fullmatch(first)
    assert found is not None, f"{check.__module__}.{check.__name__}: {first}"
    fields = re.sub(r"(^|(?<=, ))([-\w][-.\w]*)", r"`\2`", found["fields"])
    return [fields, found["reason"], found["instead"].replace("|", "\\|")]


def page() -> str:
    lines = [
        "# What is refused",
        "",
        "A request that cannot be carried out ends with exit status 2 and every reason of a moment",
        "at once, with its field, its value and what to write. Here is their general form, in the",
        "order in which a start asks. Rules of a config are asked again when it was downloaded.",
        "",
        "This page is written by `python -m tests.refusals_page`.",
        "",
    ]
    for title, checks in MOMENTS.items():
        rows = [row(check) for check in dict.fromkeys(checks) if check not in COLLECTORS]
        lines += [f"## {title}", "", "| field | reason | instead |", "|---|---|---|"]
        lines += [f"| {' | '.join(cells)} |" for cells in rows] + [""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
