"""Random changes to the bytes, lines or values of a file.

Every function takes a random generator, so that a case can be reproduced from its number.
"""

import bz2
import copy
import csv
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml

DEEP, DIGITS, LONG = "\x01deep\x01", "\x01digits\x01", "\x01long\x01"
"""Placeholders for values that `json.dumps` cannot write: see `TEXTS`."""
TEXTS = {
    f'"{json.dumps(DEEP)[1:-1]}"': "[" * 20_000 + "]" * 20_000,
    f'"{json.dumps(DIGITS)[1:-1]}"': "9" * 5_000,
    f'"{json.dumps(LONG)[1:-1]}"': '"' + "x" * 100_000 + '"',
}
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 0.5, -0.0, 2**31, 2**63, -(2**63) - 1, 10**30, 10**400,
    1e308, -1e308, 1e-320, float("inf"), float("-inf"), float("nan"), "", " ", "\0", "\n", "a",
    "../../..", "/", "~nobody/x", "é", "\ud800", "\u202e", "null", "1e5", "nan", "{{ 1 }}", "<b>",
    "<|im_end|>", "none", "auto", "cuda", "x" * 300, "https://a:b@c.d/e", [], [[]], [None], [1],
    ["a"], {}, {"": None}, {"a": 1}, {"a": {"b": []}}, [{"a": None}], DEEP, DIGITS, LONG,
]  # fmt: skip
BOMS = [b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\xff\xfe\x00\x00"]
ENCODINGS = ["utf-16", "utf-32", "latin-1", "cp1252", "utf-8-sig", "shift_jis"]
GARBAGE = [b"\0", b"\n", b"\r", b"\xff", b"\xc3", b'"', b"'", b"{", b"}", b"[", b"\\u", b"\\", b",",
           b"\t", b"%", b"\x1a", b"\x85", b"\xe2\x80\xa8", b"null", b"1e999", b"NaN"]  # fmt: skip


def of_bytes(rng: random.Random, content: bytes) -> bytes:
    """Truncate, flip, repeat, insert or re-encode bytes."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        place = rng.randrange(len(changed) + 1)
        kind = rng.randrange(9)
        if kind == 0:
            del changed[place:]
        elif kind in (1, 2) and changed:
            changed[place - 1] ^= 1 << rng.randrange(8)
        elif kind == 3 and changed:
            changed[place - 1] = rng.randrange(256)
        elif kind in (4, 5):
            changed[place:place] = rng.choice(GARBAGE)
        elif kind == 6:
            changed[:0] = rng.choice(BOMS)
        elif kind == 7:
            end = place + rng.randrange(40)
            changed[place:end] = changed[place:end] * rng.randrange(4)
        else:
            text = changed.decode("utf-8", "replace")
            changed = bytearray(text.encode(rng.choice(ENCODINGS), "replace"))
    return bytes(changed)


def of_lines(rng: random.Random, content: bytes) -> bytes:
    """Repeat, remove, swap or insert lines, or change their endings."""
    lines = content.splitlines(keepends=True) or [b""]
    place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.randrange(6)
    if kind == 0:
        lines.insert(place, lines[other])
    elif kind == 1:
        del lines[place]
    elif kind == 2:
        lines[place], lines[other] = lines[other], lines[place]
    elif kind == 3:
        lines.insert(place, rng.choice(GARBAGE) + rng.choice((b"\n", b"")))
    elif kind == 4:
        lines = [line.rstrip(b"\r\n") + rng.choice((b"\r\n", b"\r", b"")) for line in lines]
    else:
        lines[place] = b"x" * rng.choice((1, 70_000)) + lines[place]
    return b"".join(lines)


def of_value(rng: random.Random, value: Any) -> Any:
    """A copy of a JSON value with random items replaced, removed, repeated or inserted."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        path = rng.choice(_places(value))
        if not path:
            if rng.random() < 0.1:
                return copy.deepcopy(rng.choice(VALUES))
            continue
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        _change(rng, holder, path[-1])
    return value


def _change(rng: random.Random, holder: Any, key: Any) -> None:
    new = copy.deepcopy(rng.choice(VALUES))
    kind = rng.randrange(6)
    if kind < 3:
        holder[key] = new
    elif kind == 3:
        del holder[key]
    elif kind == 4 and isinstance(holder, dict):
        holder[rng.choice(("", "a", "\0", "x" * 300, "type", "name", str(key)))] = new
    elif isinstance(holder, list):
        holder.insert(key, rng.choice((new, copy.deepcopy(holder[key]))))
    else:
        other = rng.choice(list(holder))
        holder[key], holder[other] = holder[other], holder[key]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values inside a JSON value."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return [path, *(p for key, each in inner for p in _places(each, (*path, key)))]


def _written(value: Any) -> str:
    text = json.dumps(value)
    for placeholder, meant in TEXTS.items():
        text = text.replace(placeholder, meant)
    return text


def of_json(rng: random.Random, content: bytes) -> bytes:
    """Change values or bytes of a JSON file."""
    if rng.random() < 0.25:
        return of_bytes(rng, content)
    return _written(of_value(rng, json.loads(content))).encode("utf-8", "surrogatepass")


def of_jsonl(rng: random.Random, content: bytes) -> bytes:
    """Change values, lines or bytes of a JSON Lines file."""
    kind = rng.random()
    if kind < 0.2:
        return of_bytes(rng, content)
    if kind < 0.4:
        return of_lines(rng, content)
    lines = content.splitlines()
    for _ in range(rng.choice((1, 1, 2))):
        place = rng.randrange(len(lines))
        try:
            lines[place] = _written(of_value(rng, json.loads(lines[place]))).encode()
        except (ValueError, RecursionError):  # an earlier change made it invalid JSON
            continue
    return b"\n".join(lines) + b"\n"


ALIASES = [
    "&a [*a]", "&a {a: *a}", "&a [&b [*a, *b]]", "{<<: &a {<<: *a}}", "&a [&a 1, *a]", "*nothing",
    "!!python/object/apply:os.getcwd []", "!!binary x", "!!timestamp x", "!!set {a, b}", "!!int x",
    "!!float x", "{? [a, b] : 1}", "{? {a: 1} : 1}", "2001-01-01", "0o17", "0x_", "1:2:3", "=",
    "!!omap [a]", "!!pairs [a]", "!!merge x", "{<<: 1}", "{<<: [1]}", "!x y", "|\n  x", "\t", "---",
    "[" * 3000, "[" * 3000 + "]" * 3000, "{a: " * 1000, "- " * 3000, "? " * 1000, "0b", ".inf",
    "9" * 5000, "1_000", "-.inf", ".nan", "@", "`", "%YAML 9.9", "!!bool x", "!!null x", "1e5",
]  # fmt: skip


def _explosion(rng: random.Random) -> str:
    """YAML lists, maps or merges in which each level has several aliases to the previous one."""
    levels, width = rng.choice((3, 6, 9, 30)), rng.choice((2, 9))
    kind = rng.randrange(3)
    forms = ("[{}]", "{{{}}}", "{{<<: [{}]}}")
    lines = ["a0: &a0 " + ("[x, x]", "{k: x}", "{k: x}")[kind]]
    for level in range(1, levels):
        aliases = [f"*a{level - 1}"] * width
        if kind == 1:
            aliases = [f"k{number}: {alias}" for number, alias in enumerate(aliases)]
        lines.append(f"a{level}: &a{level} {forms[kind].format(', '.join(aliases))}")
    return "\n".join(lines) + "\n"


def of_yaml(rng: random.Random, content: bytes) -> bytes:
    """Change values, aliases, tags, lines or bytes of a YAML file."""
    kind = rng.random()
    if kind < 0.15:
        return of_bytes(rng, content)
    if kind < 0.3:
        return of_lines(rng, content)
    if kind < 0.4:
        more, text = _explosion(rng), content.decode()
        return (more + text if rng.random() < 0.5 else text + more).encode()
    value = of_value(rng, yaml.load(content, yaml.CSafeLoader))
    try:
        text = yaml.dump(value, Dumper=yaml.CSafeDumper, allow_unicode=True)
    except UnicodeEncodeError:  # libyaml does not write unpaired surrogates
        text = yaml.safe_dump(value, allow_unicode=True)
    if kind < 0.7:
        lines = text.splitlines()
        place = rng.randrange(len(lines))
        lines[place] = f"{lines[place].split(':')[0]}: {rng.choice(ALIASES)}"
        text = "\n".join(lines) + "\n"
    return text.encode("utf-8", "surrogatepass")


PIECES = [
    "{% for message in messages %}", "{% endfor %}", "{{ message['role'] }}", "{{ bos_token }}",
    "{{ message.content }}", "<|im_start|>", "<|im_end|>", "{% if add_generation_prompt %}",
    "{% endif %}", "{{ messages[9].content }}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}",
    "{{ message.content[::0] }}", "{{ ''.__class__.__mro__ }}", "{% set x = 1 %}", "{{ none.x.y }}",
    "{% generation %}", "{% endgeneration %}", "{{ messages | tojson }}", "{{ namespace }}", "{{",
    "}}", "{% include 'x' %}", "{% import 'os' as os %}", "{{ message | upper }}", "text", "\n",
    "é", "{{ messages | length }}", "{% break %}", "{% continue %}", "{{ loop.index }}",
    "{{ strftime_now('%Y') }}", "{{ strftime_now('%Q') }}", "{{ messages | sort }}",
    "{{ message.content | int }}", "{{ range(10) | list }}", "{{ tools | tojson(indent=-1) }}",
    "{{ [1, 'a'] | sort }}", "{{ messages | map(attribute='content') | join }}", "{{ self }}",
    "{{ '%d' % 'a' }}", "{{ 'a' * -1 }}", "{{ dict(a=1) | items }}", "{{ messages | first }}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "{{ message.tool_calls[0].function }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "{{ 'x'.format(1) }}",
    "{{ '{0.__class__}'.format(1) }}", "{{ message.content.encode() }}", "{{ lipsum() }}",
    "{{ cycler() }}", "{{ messages | batch(0) | list }}", "{{ message.content | truncate(-1) }}",
    "{% call f() %}{% endcall %}", "{% filter upper %}x{% endfilter %}", "{% raw %}", "{# ",
]  # fmt: skip


def of_template(rng: random.Random, content: bytes) -> bytes:
    """Change pieces, lines or bytes of a chat template, or generate one from pieces."""
    kind = rng.random()
    if kind < 0.25:
        return of_bytes(rng, content)
    if kind < 0.4:
        return of_lines(rng, content)
    if kind < 0.6:
        return "".join(rng.choices(PIECES, k=rng.randrange(1, 9))).encode()
    text = content.decode()
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.choice([0, len(text), *(n + 2 for n, c in enumerate(text[:-1]) if c == "}")])
        text = text[:place] + rng.choice(PIECES) + text[place:]
    return text.encode()


def of_csv(rng: random.Random, content: bytes, delimiter: str) -> bytes:
    """Change cells, lines or bytes of a CSV file."""
    if (kind := rng.random()) < 0.6:
        return of_bytes(rng, content) if kind < 0.3 else of_lines(rng, content)
    rows = list(csv.reader(io.StringIO(content.decode()), delimiter=delimiter))
    row = rng.choice(rows)
    row[rng.randrange(len(row))] = str(rng.choice(VALUES)).replace("\ud800", "")
    written = io.StringIO()
    csv.writer(written, delimiter=delimiter).writerows(rows)
    return written.getvalue().encode()


def of_table(rng: random.Random, content: bytes, arrow: bool) -> bytes:
    """Change bytes or values of a Parquet or Arrow file."""
    if rng.random() < 0.4:
        return of_bytes(rng, content)
    source = pyarrow.BufferReader(content)
    table = (
        pyarrow.ipc.open_stream(source).read_all() if arrow else pyarrow.parquet.read_table(source)
    )
    written = io.BytesIO()
    try:
        made = pyarrow.Table.from_pylist([of_value(rng, row) for row in table.to_pylist()])
        if arrow:
            with pyarrow.ipc.new_stream(written, made.schema) as stream:
                stream.write_table(made)
        else:
            pyarrow.parquet.write_table(made, written)
    except (pyarrow.ArrowException, ValueError, TypeError, OverflowError, AttributeError):
        return of_bytes(rng, content)  # Arrow cannot represent the table
    return written.getvalue()


def of_tensors(rng: random.Random, content: bytes) -> bytes:
    """Change the header, the header length or bytes of a safetensors file."""
    kind, size = rng.random(), int.from_bytes(content[:8], "little")
    if kind < 0.4:
        return of_bytes(rng, content)
    if kind < 0.5:
        other = rng.choice((0, 1, size - 1, size + 1, 2**31, 2**63, 2**64 - 1))
        return other.to_bytes(8, "little") + content[8:]
    header = _written(of_value(rng, json.loads(content[8 : 8 + size])))
    told = header.encode("utf-8", "surrogatepass")
    return len(told).to_bytes(8, "little") + told + content[8 + size :]


Change = Callable[[random.Random, bytes], bytes]

CHANGES: dict[str, Change] = {
    ".json": of_json,
    ".jsonl": of_jsonl,
    ".ndjson": of_jsonl,
    ".yaml": of_yaml,
    ".jinja": of_template,
    ".csv": lambda rng, content: of_csv(rng, content, ","),
    ".tsv": lambda rng, content: of_csv(rng, content, "\t"),
    ".parquet": lambda rng, content: of_table(rng, content, arrow=False),
    ".arrow": lambda rng, content: of_table(rng, content, arrow=True),
    ".safetensors": of_tensors,
}


def _packed_by_zstandard(content: bytes) -> bytes:
    written = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(written, "zstd") as stream:
        stream.write(content)
    return written.getvalue().to_pybytes()


def _unpacked_by_zstandard(content: bytes) -> bytes:
    return pyarrow.input_stream(pyarrow.BufferReader(content), compression="zstd").read()


PACKERS: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    ".gz": (gzip.decompress, gzip.compress),
    ".bz2": (bz2.decompress, bz2.compress),
    ".xz": (lzma.decompress, lzma.compress),
    ".zst": (_unpacked_by_zstandard, _packed_by_zstandard),
}


def change(rng: random.Random, name: str, content: bytes) -> bytes:
    """The changed content of a file, by the type that its name indicates."""
    path = PurePath(name)
    packer = PACKERS.get(path.suffix)
    if packer is not None and rng.random() < 0.6:
        unpack, pack = packer
        return pack(change(rng, path.stem, unpack(content)))
    return CHANGES.get(path.suffix, _of_text)(rng, content)


def _of_text(rng: random.Random, content: bytes) -> bytes:
    return of_bytes(rng, content) if rng.random() < 0.6 else of_lines(rng, content)
