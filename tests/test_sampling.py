"""Completions are a function of the model, the seed and the prompt, not of batches."""

from typing import Any, NamedTuple

import pytest
import torch
from tiny_run import sample_ids, tiny_llama

from finetune.inference.decoder import Row
from finetune.inference.noise import draw, exponential, philox
from finetune.inference.sampling import Completion, sample

STOPS, PAD, LIMIT = (256, 259), 257, 12


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


class Wanted(NamedTuple):
    prompt: tuple[int, ...]
    row: int
    number: int


class Sampler(NamedTuple):
    model: Any
    stops: tuple[int, ...]
    limit: int
    temperature: float
    pad: int
    at_once: int = 64

    def __call__(self, wanted: list[Wanted], seed: int, step: int) -> list[Completion]:
        rows = [
            Row(each.prompt, self.limit, self.stops, self.temperature, name=each[1:])
            for each in wanted
        ]
        return sample(self.model, rows, self.pad, self.at_once, seed, step)


def wanted() -> list[Wanted]:
    """Prompts of several lengths, four completions of each."""
    prompts = [tuple(range(40, 40 + length)) for length in (1, 5, 5, 9, 30, 3)]
    prompts[2] = tuple(reversed(prompts[2]))
    return [Wanted(prompt, row, n) for row, prompt in enumerate(prompts) for n in range(4)]


def ids(found: list[Completion]) -> list[list[int]]:
    return [each.ids for each in found]


def sampler(model: Any, temperature: float, rows: int) -> Sampler:
    return Sampler(model, STOPS, LIMIT, temperature, PAD, rows)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_noise_is_that_of_philox(counter, key, words):
    """Known answers of Random123 for philox4x32 with 10 rounds."""
    found = philox([torch.tensor([word]) for word in counter], key)
    assert tuple(int(word) for word in found) == words


def test_noise_is_exponential() -> None:
    names = torch.tensor([[row, number] for row in range(20) for number in range(5)])
    noise = exponential((3, 4), names, torch.full((100,), 2), 101).flatten().sort().values
    below = torch.arange(len(noise)) / len(noise)
    distance = (1 - torch.exp(-noise) - below).abs().max().item()
    assert distance * len(noise) ** 0.5 < 1.63  # Kolmogorov-Smirnov at 1 %
    assert len(noise.unique()) == len(noise)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_completions_do_not_depend_on_batches(model: Any, temperature: float) -> None:
    all_of_them = wanted()
    together = sampler(model, temperature, 64)(all_of_them, seed=1, step=2)
    pieces = sampler(model, temperature, 5)(all_of_them, seed=1, step=2)
    shares = [sampler(model, temperature, 64)(all_of_them[r::2], 1, 2) for r in (0, 1)]
    assert (ids(together), ids(together[0::2])) == (ids(pieces), ids(shares[0]))
    assert ids(together[1::2]) == ids(shares[1])


def test_completions_depend_on_seed_step_prompt_and_number(model: Any) -> None:
    draw = sampler(model, 1.0, 64)
    prompt = (41, 42, 43)
    found = [
        draw([Wanted(prompt, row, number)], seed, step)[0].ids
        for row, number, seed, step in [
            (0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1),
        ]
    ]  # fmt: skip
    assert len({tuple(each) for each in found}) == len(found)


def test_every_stop_token_ends_a_completion_and_belongs_to_it(model: Any) -> None:
    """Tokens that are sampled often are made the stops."""
    usual = Sampler(model, (), LIMIT, 1.0, PAD)(wanted(), 0, 0)
    second = {each.ids[1] for each in usual[:2]}
    stopped = Sampler(model, tuple(second), LIMIT, 1.0, PAD)(wanted(), 0, 0)
    for before, after in zip(usual, stopped, strict=True):
        places = [place for place, token in enumerate(before.ids) if token in second]
        assert after.ids == before.ids[: places[0] + 1 if places else LIMIT]
        assert after.ended == bool(places)


def test_samples_and_entropy_are_of_the_distribution_at_that_temperature(model: Any) -> None:
    prompt = tuple(sample_ids()[0].tolist())
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1].double() / 0.7
    shares = logits.softmax(-1)
    draw = Sampler(model, (), 1, 0.7, PAD, 4096)
    found = draw([Wanted(prompt, 0, number) for number in range(4096)], 0, 0)
    counts = torch.bincount(torch.tensor([each.ids[0] for each in found]), minlength=len(shares))
    likely = shares > 5 / 4096  # at least five expected: what a chi-square test asks for
    seen = torch.cat([counts[likely], counts[~likely].sum()[None]])
    expected = torch.cat([shares[likely], shares[~likely].sum()[None]]) * 4096
    distance = ((seen - expected) ** 2 / expected).sum().item()
    free = len(expected) - 1
    assert distance < free + 3 * (2 * free) ** 0.5  # chi-square: three standard deviations
    entropy = -(shares * shares.log()).sum().item()
    assert found[0].entropy == pytest.approx(entropy, rel=1e-4)


@pytest.mark.parametrize("vocabulary", [5, 260, 1537])
def test_a_token_is_the_largest_share_over_its_noise(vocabulary: int) -> None:
    names = torch.tensor([[row // 4, row % 4] for row in range(64)])
    for place, sharpness in enumerate((0.1, 1.0, 5.0, 30.0)):
        torch.manual_seed(place)
        shares = (torch.randn(64, vocabulary) * sharpness).softmax(-1)
        places = [place + row % 3 for row in range(64)]
        noise = exponential((2**32 - 3, 7), names, torch.tensor(places), vocabulary)
        expected = noise.reciprocal().mul(shares).argmax(-1)
        assert draw(shares, (2**32 - 3, 7), names, places).equal(expected)
