"""Import the modules of rewards in a process of their own, to find those that end it.

Such a module would end the training without a message.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import NoReturn

from finetune.process import interpreter
from finetune.process.signals import end_group, name_of
from finetune.rewards import Reward

DONE = "."
"""Output after the last import; no module has this name."""


def fatal_imports(rewards: Iterable[Reward]) -> list[str]:
    """Problems of modules that end the process that imports them.

    Modules that this process has imported are not imported again. Exceptions are left to
    `finetune.extensions`.
    """
    names = {reward.function.partition(":")[0]: reward.function for reward in rewards}
    modules = [each for each in names if f"{each}:" in names[each] and each not in sys.modules]
    if not modules:
        return []
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import import_all"
    process = subprocess.Popen(
        interpreter.python("-c", f"{code}; import_all({json.dumps(modules)})"),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        begun = process.communicate()[0].split()
    finally:
        end_group(process)
    if not begun or begun[-1] == DONE:
        return []
    module = begun[-1]
    return [
        f"reward_funcs: '{names[module]}': importing {module} {end_of(process.returncode)}; move "
        "the code that does so into a function"
    ]


def import_all(modules: list[str]) -> NoReturn:
    """Print the name of each module before importing it, and `DONE` after the last one.

    The output of the modules is discarded.
    """
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for module in modules:
        print(module, file=output, flush=True)
        try:
            __import__(module)
        except BaseException:  # reported when it is imported to be used
            continue
    print(DONE, file=output, flush=True)
    os._exit(0)


def end_of(status: int) -> str:
    """Description of how a process ended, from its exit status, negative for a signal."""
    if status >= 0:
        return f"ended its process with status {status}"
    memory = ", as when memory runs out" if status == -signal.SIGKILL else ""
    return f"had its process killed by {name_of(-status)}{memory}"
