"""A weight of another toolkit that changes the loss is translated, or named as lost."""

import pytest

from finetune import importers

AXOLOTL = "base_model: m\ndatasets: [{{path: d, type: chatml.ultra}}]\nrl: {}"


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("simpo", {"sft_weight": 1.0}),  # TRL's default of cpo_alpha, which axolotl keeps
        ("simpo\ncpo_alpha: 0.0", {"sft_weight": 0.0}),
        ("simpo\ncpo_alpha: 0.2\nrl_beta: 2", {"sft_weight": 0.2, "beta": 2.0}),
        ("dpo\nrpo_alpha: 0.5", {"sft_weight": 0.5}),
        ("orpo\nrl_beta: 0.3", {"beta": 0.3}),
        ("orpo\nrl_beta: 0.3\norpo_alpha: 0.2", {"beta": 0.2}),
    ],
)
def test_weights_of_axolotl_are_translated(tmp_path, words, fields):
    (tmp_path / "f.yml").write_text(AXOLOTL.format(words))
    recipe, said, _ = importers.import_recipe(tmp_path / "f.yml", 1)
    assert {name: getattr(recipe, name) for name in fields} == fields
    assert "no counterpart" not in {kind for kind, _ in said.outcomes.values()}


@pytest.mark.parametrize(
    "words", ["kto\nmicro_batch_size: 8\npref_ftx: 0.5", "orpo\npref_ftx: 0.5"]
)
def test_a_cross_entropy_that_a_method_cannot_add_is_lost(tmp_path, words):
    (tmp_path / "f.yml").write_text(AXOLOTL.format(words))
    _, said, _ = importers.import_recipe(tmp_path / "f.yml", 1)
    assert said.outcomes["pref_ftx"][0] == "no counterpart"
