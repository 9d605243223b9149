"""Rewards by the length of completions, which runs of online methods name."""


def even(completions, **_):
    lengths = length(completions)
    if any(each % 2 for each in lengths):
        raise ValueError("an odd length")
    return lengths


def length(completions, **_):
    return [float(len(said)) for said in completions]


def short(completions, **_):
    return [-each for each in length(completions)]
