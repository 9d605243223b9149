"""Whatever a file holds, the answer is a value or a FinetuneError, in time; never another error.

A few cases of each kind run every day; marked slow are 2,600 of each of the eight kinds, 20,800.
"""

import contextlib
import copy
import datetime
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import build_tokenizer, conversations
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from finetune import backend, catalog
from finetune.data.chat.render import load_chat
from finetune.data.formats import FORMATS
from finetune.data.prepare import prepare
from finetune.errors import FinetuneError
from finetune.methods import SFT
from finetune.recipe import Data
from finetune.runs.manifest import damage
from finetune.runs.metrics import KINDS, Metrics, read_history
from finetune.runs.run import Run

QUICK, MANY = 60, 2_600
SECONDS = 10
"""A case takes milliseconds; one that takes so long counts as a hang."""

SCRATCH = Path(tempfile.mkdtemp(prefix="finetune-fuzz-"))
TOKENIZER = build_tokenizer(["hello there"])

# Values.

numbers = st.integers() | st.floats() | st.just(10**400) | st.just(-1)
texts = st.text(max_size=12) | st.sampled_from(["", "\0", "../..", "1e5", "null", "é", "\ud800"])
leaves = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything inside a JSON value."""
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    else:
        inner = []
    return [path, *(p for key, each in inner for p in places(each, (*path, key)))]


@st.composite
def changed(draw: st.DrawFn, valid: Any) -> Any:
    """A valid value with up to three of its places replaced, removed, or given a new neighbour."""
    value = copy.deepcopy(valid)
    for _ in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from(places(value)))
        if not path:
            return draw(values)
        place = value
        for key in path[:-1]:
            place = place[key]
        match draw(st.sampled_from(["replace", "remove", "add"])):
            case "replace":
                place[path[-1]] = draw(values)
            case "remove":
                del place[path[-1]]
            case "add" if isinstance(place, dict):
                place[draw(texts)] = draw(values)
    return value


def torn(text: st.SearchStrategy[str]) -> st.SearchStrategy[bytes]:
    """The bytes of a text, whole, cut, or with some of them changed."""

    @st.composite
    def build(draw: st.DrawFn) -> bytes:
        content = bytearray(draw(text).encode("utf-8", "surrogatepass"))
        if draw(st.booleans()):
            content = content[: draw(st.integers(0, len(content)))]
        for _ in range(draw(st.integers(0, 2)) if content else 0):
            content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
        return bytes(content)

    return build()


def as_json(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[str]:
    return strategy.map(lambda value: json.dumps(value))


def write(name: str, content: bytes) -> Path:
    path = SCRATCH / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# Kinds: how a case is made, and what reads it.

FIELDS = catalog.to_fields(SFT().with_data(Data("d.jsonl", "messages")).with_lora())


def read_recipe(content: bytes) -> None:
    catalog.load(write("recipe.json", content))


def read_yaml(content: bytes) -> None:
    recipe = catalog.load(write("recipe.yaml", content))
    assert not catalog.differences(recipe, catalog.from_fields(catalog.to_fields(recipe)))


def read_overrides(pairs: list[str]) -> None:
    catalog.override(catalog.from_fields(FIELDS), pairs)


BACKEND = (Path(__file__).parent.parent / "accelerate_configs/zero3_offload.yaml").read_text()


def read_backend(content: bytes) -> None:
    backend.load(str(write("backend.yaml", content)))


ROWS = {
    "messages": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    },
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "alpaca": {"instruction": "a", "input": "b", "output": "c"},
    "text": {"text": "a"},
}  # fmt: skip


@st.composite
def data_files(draw: st.DrawFn) -> tuple[str, str, bytes]:
    """A format, the ending of a file's name, and its content."""
    name = draw(st.sampled_from(sorted(FORMATS)))
    rows = changed(ROWS.get(name, ROWS["messages"]))
    ending = draw(st.sampled_from(["jsonl", "json", "csv", "txt", "parquet"]))
    lines = st.lists(as_json(rows), max_size=3)
    joined = lines.map(
        lambda given: "\n".join(given) if ending != "json" else f"[{','.join(given)}]"
    )
    return name, ending, draw(torn(joined))


def read_data(case: tuple[str, str, bytes]) -> None:
    name, ending, content = case
    path = write(f"data.{ending}", content)
    prepare(SFT().with_data(Data(str(path), name)), load_chat(TOKENIZER, "chatml"), SCRATCH)


PIECES = [
    "{% for message in messages %}", "{% endfor %}", "{{ message['role'] }}",
    "{{ message.content }}", "<|im_start|>", "<|im_end|>", "{% if add_generation_prompt %}",
    "{% endif %}", "{{ bos_token }}",
    "{{ messages[9].content }}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}",
    "{{ message.content[::0] }}", "{{ ''.__class__.__mro__ }}", "{% set x = 1 %}", "{{ none.x.y }}",
    "{% generation %}", "{% endgeneration %}", "{{ messages | tojson }}", "{{ namespace }}", "{{",
    "}}",
    "{% include 'x' %}", "{% import 'os' as os %}", "{{ message | upper }}", "text", "\n", "é",
]  # fmt: skip
templates = st.lists(st.sampled_from(PIECES), max_size=9).map("".join) | st.text(max_size=20)


def read_template(template: str) -> None:
    path = write("template.jinja", template.encode("utf-8", "surrogatepass"))
    chat = load_chat(TOKENIZER, str(path))
    rows = "".join(json.dumps({"messages": row}) + "\n" for row in conversations(2))
    data = write("chat.jsonl", rows.encode())
    prepare(SFT().with_data(Data(str(data), "messages")), chat, SCRATCH)


MANIFEST = {
    "format": 1,
    "step": 3,
    "progress": {"step": 3, "best_loss": None, "best_step": None, "stale": 0, "skipped": 0},
    "backend": "single",
    "processes": 1,
    "shapes": {"w": [2, 3]},
    "scalars": {"w": {"step": 3.0}},
    "files": {"state/w": {"bytes": 1, "sha256": "00"}},
}


def read_manifests(content: bytes) -> None:
    damage(write("step-00000003/manifest.json", content).parent)


TRAINED = {
    "kind": "train", "step": 1, "time": 1.0, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1,
    "trained_tokens": 1, "real_tokens": 1, "slots": 1, "seconds": 1.0, "tokens_per_second": 1.0,
    "memory": 1, "epoch": 0.5,
}  # fmt: skip


def read_metrics(content: bytes) -> None:
    run = Run(SCRATCH / "run")
    write("run/metrics.jsonl", content)
    history = read_history(run)
    assert history.step >= 0
    assert history.seconds is not None
    assert history.peak_memory >= 0
    assert history.best is None or history.evaluated
    write("run/metrics.jsonl", content)
    Metrics(run, speaks=True).resume_at(5)


CASES: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], None]]] = {
    "recipes": (torn(as_json(changed(FIELDS))), read_recipe),
    "YAML": (torn(changed(FIELDS).map(yaml.safe_dump) | st.text(max_size=40)), read_yaml),
    "overrides": (
        st.lists(
            st.tuples(
                st.sampled_from([".".join(map(str, p)) for p in places(FIELDS)]) | texts,
                as_json(values) | texts,
            ).map("=".join),
            max_size=3,
        ),
        read_overrides,
    ),
    "backends": (torn(changed(yaml.safe_load(BACKEND)).map(yaml.safe_dump)), read_backend),
    "data": (data_files(), read_data),
    "templates": (templates, read_template),
    "manifests": (torn(as_json(changed(MANIFEST))), read_manifests),
    "metrics": (
        torn(
            st.lists(
                as_json(changed(TRAINED) | st.sampled_from([{"kind": kind} for kind in KINDS])),
                max_size=4,
            ).map("\n".join)
        ),
        read_metrics,
    ),
}  # fmt: skip


def run_cases(kind: str, count: int) -> None:
    strategy, read = CASES[kind]

    @settings(
        max_examples=count,
        deadline=datetime.timedelta(seconds=SECONDS),
        database=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def check(case: Any) -> None:
        with contextlib.suppress(FinetuneError):
            read(case)

    check()


@pytest.mark.parametrize("kind", CASES)
def test_a_file_of_any_content_is_read_or_refused(kind: str) -> None:
    run_cases(kind, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_thousands_of_files_of_any_content_are_read_or_refused(kind: str) -> None:
    run_cases(kind, MANY)
