"""Each family that reads images trains as in plain transformers, or is refused by name."""

import image_families
import pytest
import torch
from test_image_training import PARTS, close, fields, pictures, steps, trained

from finetune import catalog
from finetune.data.prepare import prepare
from finetune.data.rows.order import rows_of_step
from finetune.models.model import load_chat_of
from finetune.planner.families import FAMILIES

STEPS, ROWS = 2, 8


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return pictures(tmp_path_factory.mktemp("pictures"))


def test_the_table_of_families_has_what_is_tested_here():
    assert {kind for kind, family in FAMILIES.items() if family.reads} == set(image_families.RIGHT)


@pytest.mark.parametrize("free", ["auto", False])
@pytest.mark.parametrize("name", image_families.RIGHT)
def test_a_family_trains_as_in_plain_transformers(rows, tmp_path, name, free):
    base = image_families.saved(name, tmp_path / "base")
    model = {"name": str(base), "trains": PARTS, "router_aux_loss": "none"}
    batch = {"rows": ROWS, "micro_rows": 4, "max_length": 2048, "padding_free": free}
    given = fields(base, rows, model=model, batch=batch, max_steps=STEPS)
    recipe = catalog.from_fields(given)
    chat = load_chat_of(recipe)
    assert chat.images is not None
    data = prepare(recipe, chat, tmp_path / "cache").train
    chosen = [rows_of_step(step, len(data), ROWS, recipe.seed).tolist() for step in range(STEPS)]
    torch.manual_seed(0)
    wanted = image_families.plain_steps(
        base, rows, chat.images.whole, data.documents, chosen, given["optim"]["lr"]
    )
    found = steps(trained(tmp_path / "run", given))
    # A step of AdamW at 1e-3 moves a weight of a tiny gradient by the sign of its rounding.
    assert close(found, wanted, of_norms=5e-5)
