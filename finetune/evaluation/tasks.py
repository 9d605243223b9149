"""Run tasks of lm-evaluation-harness on a loaded model, with the prompt tokens of its training."""

import dataclasses
import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import yaml
from datasets.exceptions import DatasetsError
from jinja2 import TemplateError

from finetune.checkpoints.stop_tokens import network_of
from finetune.data.chat.render import load_chat
from finetune.data.chat.turns import QUESTION
from finetune.data.samples import Completion, Conversation
from finetune.errors import FinetuneError, did_you_mean, refuse
from finetune.evaluation.measures import Measure, of_scores
from finetune.inference.generate import Loaded
from finetune.version import install

OF_TEXT = ("loglikelihood", "loglikelihood_rolling")
"""Output types with wrong results for chats: the harness moves whitespace at the end of the
rendered prompt into the answer, where training never had it."""

TASK_ERRORS = (
    ValueError, LookupError, TypeError, AttributeError, OSError, ImportError, AssertionError,
    TemplateError, DatasetsError,
)  # fmt: skip
"""Errors that the harness raises for a task whose file or data are invalid."""


@dataclasses.dataclass(frozen=True)
class Tasks:
    """Tasks by name, with the folders of task files."""

    names: tuple[str, ...]
    folders: tuple[str, ...]
    published: bool
    """Whether any task is not from a file."""
    limit: int | None
    max_new_tokens: int
    batch_rows: int

    def manager(self) -> Any:
        """The harness's task index, with its built-in tasks only if one of them is used."""
        from lm_eval.tasks import TaskManager

        return TaskManager(include_path=list(self.folders), include_defaults=self.published)


def find_tasks(words: Sequence[str], limit: int | None, max_new_tokens: int, rows: int) -> Tasks:
    """Find published tasks by name, or tasks in the user's YAML files.

    Raises:
        FinetuneError: the harness is not installed, a file is not a task, or a name is unknown.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise FinetuneError(f"--tasks: needs lm-evaluation-harness: {install('lm-eval')}")
    names, folders, problems = list[str](), list[str](), list[str]()
    for word in words:
        if not word.endswith((".yaml", ".yml")):
            names.append(word)
            continue
        try:
            found = yaml.load(Path(word).read_text(encoding="utf-8"), _Permissive)
            names.append(str(found["task"]))
            folders.append(str(Path(word).resolve().parent))
        except (OSError, yaml.YAMLError, TypeError, LookupError, ValueError) as error:
            problems.append(f"--tasks {word}: not a task of the harness: {error}")
    refuse(problems)
    own = tuple(dict.fromkeys(folders))
    tasks = Tasks(tuple(names), own, len(folders) < len(names), limit, max_new_tokens, rows)
    known = tasks.manager().all_tasks
    unknown = [name for name in names if name not in known]
    refuse(f"--tasks: there is no task '{name}'{did_you_mean(name, known)}" for name in unknown)
    return tasks


class _Permissive(yaml.SafeLoader):
    """Reads the harness's `!function` tags as text."""


_Permissive.add_constructor("!function", lambda loader, node: str(node.value))


def task_measures(loaded: Loaded, tasks: Tasks) -> tuple[list[Measure], list[str]]:
    """All metrics of all tasks as `TASK/METRIC`, and notes about omitted ones.

    A task that extracts answers with several filters has `TASK/METRIC/FILTER`.

    Raises:
        FinetuneError: the harness cannot load or run a task, or would use other prompt tokens than
            training.
    """
    from lm_eval import simple_evaluate

    model, is_chat = _harness(loaded, tasks)
    network: Any = network_of(loaded.model)
    network.generation_config.eos_token_id = list(loaded.stops) or None
    room = min(tasks.max_new_tokens, (loaded.context or 2 * tasks.max_new_tokens) // 2)
    try:
        found = simple_evaluate(
            model=model,
            tasks=list(tasks.names),
            task_manager=tasks.manager(),
            limit=tasks.limit,
            apply_chat_template=is_chat,
            gen_kwargs={"max_gen_toks": room, "do_sample": False},
            bootstrap_iters=0,
        )
    except ConnectionError as error:  # its message names the data set
        raise FinetuneError(
            f"--tasks: {error}, and it is not in the cache, {datasets.config.HF_DATASETS_CACHE}. "
            "Run the same command once where the hub can be reached, which fills the cache, and "
            "set HF_DATASETS_CACHE to a copy of that folder (HF_HUB_OFFLINE=1 skips retries); or "
            "name a YAML file of a task whose dataset_path is a local folder"
        ) from error
    except TASK_ERRORS as error:
        raise FinetuneError(f"--tasks: {type(error).__name__}: {error}") from error
    finally:
        network.generation_config.eos_token_id = None
    assert found is not None
    return _read(found, is_chat)


def _harness(loaded: Loaded, tasks: Tasks) -> tuple[Any, bool]:
    """The harness's model, and whether prompts use its chat template."""
    from lm_eval.models.huggingface import HFLM

    chat = load_chat(loaded.tokenizer, None)
    is_chat = chat.template is not None
    plain = chat.prompt(Completion("a", "b"))
    opens = plain[:1] == [loaded.tokenizer.bos_token_id]
    model: Any = loaded.model
    harness = HFLM(
        pretrained=model,
        tokenizer=loaded.tokenizer,
        backend="causal",
        batch_size=tasks.batch_rows,
        device=str(model.device),
        add_bos_token=opens and not is_chat,
    )
    text, wanted = "a", plain
    if is_chat:
        text = harness.apply_chat_template([dict(QUESTION)])
        wanted = chat.prompt(Conversation((QUESTION,)))
    got = harness.tok_encode(text)
    if got != wanted:
        raise FinetuneError(
            f"--tasks: the harness would tokenize prompts differently than training: {got[:20]} "
            f"instead of {wanted[:20]}"
        )
    return harness, is_chat


def _read(found: Mapping[str, Any], is_chat: bool) -> tuple[list[Measure], list[str]]:
    measures, notes = list[Measure](), list[str]()
    for task, samples in found["samples"].items():
        kind = found["configs"][task].get("output_type")
        if is_chat and kind in OF_TEXT:
            notes.append(
                f"{task}: not reported: {kind} of a chat scores a token that training "
                "did not see there; use the loss above"
            )
            continue
        higher = found["higher_is_better"].get(task, {})
        filters = list(dict.fromkeys(each.get("filter") for each in samples))
        names = dict.fromkeys(name for each in samples for name in each.get("metrics", ()))
        for metric, kept in itertools.product(names, filters):
            of_filter = [each for each in samples if each.get("filter") == kept]
            ordered = sorted(of_filter, key=lambda each: each["doc_id"])
            scores = [each.get(metric) for each in ordered]
            if all(isinstance(score, int | float) for score in scores):
                name = f"{task}/{metric}" + (f"/{kept}" if len(filters) > 1 else "")
                binary = set(scores) <= {0, 1}
                better = "higher" if higher.get(metric, True) else "lower"
                unit = "share" if all(0 <= score <= 1 for score in scores) else ""
                measures.append(of_scores(name, scores, binary=binary, better=better, unit=unit))
    return measures, notes
