"""Start Python for a process of the toolkit so that no file of the working folder is picked up.

`python -m NAME` puts the working folder first on the path: a `finetune.py` or a `tokenize.py` that
a user keeps there would run in the place of the toolkit, or of the standard library.
"""

import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
"""The folder that holds the package: site-packages, or a checkout."""


def python(*words: str) -> list[str]:
    """The command of this interpreter with `words`, without the working folder on its path."""
    return [sys.executable, "-P", *words]


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables with which every interpreter below a process finds this very toolkit.

    `accelerate launch` and torch's agent start interpreters of their own, which read them. An empty
    entry of PYTHONPATH, which means the working folder, is left out.
    """
    kept = [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry]
    usual = {Path(folder).resolve() for folder in (*site.getsitepackages(), _own_site())}
    if HOME not in usual:
        kept = [str(HOME), *(entry for entry in kept if entry != str(HOME))]
    changed = {"PYTHONSAFEPATH": "1"} | ({"PYTHONPATH": os.pathsep.join(kept)} if kept else {})
    rest = {name: value for name, value in variables.items() if name != "PYTHONPATH"}
    return rest | changed


def _own_site() -> str:
    """The user's site-packages, where this interpreter reads them."""
    return site.getusersitepackages() if site.ENABLE_USER_SITE else site.getsitepackages()[0]
