"""Start Python for the toolkit's processes without the working folder on `sys.path`.

`python -m NAME` puts the working folder first on the path: a user's `finetune.py` or `tokenize.py`
there would be imported instead of the toolkit or the standard library.
"""

import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
"""The folder that contains the package: site-packages or a checkout."""


def python(*words: str) -> list[str]:
    """Command that runs this interpreter with `words`, without the working folder on its path."""
    return [sys.executable, "-P", *words]


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables with which all child interpreters import this copy of the toolkit.

    `accelerate launch` and torch's agent start their own interpreters, which inherit them. An empty
    entry in PYTHONPATH, which means the working folder, is removed.
    """
    kept = [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry]
    usual = {Path(folder).resolve() for folder in (*site.getsitepackages(), _site_packages())}
    if HOME not in usual:
        kept = [str(HOME), *(entry for entry in kept if entry != str(HOME))]
    changed = {"PYTHONSAFEPATH": "1"} | ({"PYTHONPATH": os.pathsep.join(kept)} if kept else {})
    rest = {name: value for name, value in variables.items() if name != "PYTHONPATH"}
    return rest | changed


def _site_packages() -> str:
    """The user's site-packages if this interpreter uses them, otherwise the global ones."""
    return site.getusersitepackages() if site.ENABLE_USER_SITE else site.getsitepackages()[0]
