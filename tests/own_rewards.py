"""Rewards of a user's own, one of which breaks."""

from pathlib import Path


def vowels(completions, scale, **_):
    return [scale[0] * sum(c in "aeiou" for c in said[-1]["content"]) for said in completions]


def scaled(completions, scale, **_):
    """Zero for a whole group where the row's scale is zero."""
    return [
        factor * sum(map(ord, said[-1]["content"]))
        for said, factor in zip(completions, scale, strict=True)
    ]


def breaks(completions, counter, **_):
    path = Path(counter)
    calls = int(path.read_text()) if path.exists() else 0
    path.write_text(str(calls + 1))
    if calls == 2:
        raise ValueError("out of order")
    return [float(len(said[-1]["content"])) for said in completions]
