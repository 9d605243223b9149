"""Training methods by name: each is a Recipe that defines the loss of a row."""

from finetune import extensions
from finetune.errors import FinetuneError
from finetune.recipe import Recipe

METHODS: dict[str, str] = {
    "sft": "finetune.methods.sft:SFT",
    "pretrain": "finetune.methods.pretrain:Pretrain",
    "dpo": "finetune.methods.dpo:DPO",
    "orpo": "finetune.methods.orpo:ORPO",
    "simpo": "finetune.methods.simpo:SimPO",
    "cpo": "finetune.methods.cpo:CPO",
    "kto": "finetune.methods.kto:KTO",
    "reward": "finetune.methods.reward:RewardModel",
    "classifier": "finetune.methods.classifier:Classifier",
    "distill": "finetune.methods.distill:Distill",
    "grpo": "finetune.methods.grpo:GRPO",
    "rloo": "finetune.methods.rloo:RLOO",
}


def find_method(name: str, field: str = "method") -> type[Recipe]:
    """The recipe class of a method: a name in `METHODS`, or `module:class` of a subclass.

    Args:
        field: name of the setting in error messages.

    Raises:
        FinetuneError: the name is unknown, cannot be imported, or is not a Recipe.
    """
    kind = extensions.find(field, name, METHODS)
    if not (isinstance(kind, type) and issubclass(kind, Recipe)):
        raise FinetuneError(f"{field}: '{name}' is not a subclass of finetune.Recipe")
    return kind
