"""Training methods by name: each is a Recipe that defines the loss of a row."""

from finetune.methods.classifier import Classifier
from finetune.methods.cpo import CPO
from finetune.methods.distill import Distill
from finetune.methods.dpo import DPO
from finetune.methods.grpo import GRPO
from finetune.methods.kto import KTO
from finetune.methods.orpo import ORPO
from finetune.methods.pretrain import Pretrain
from finetune.methods.reward import RewardModel
from finetune.methods.rloo import RLOO
from finetune.methods.sft import SFT
from finetune.methods.simpo import SimPO
from finetune.recipe import Recipe

METHODS: dict[str, type[Recipe]] = {
    "sft": SFT,
    "pretrain": Pretrain,
    "dpo": DPO,
    "orpo": ORPO,
    "simpo": SimPO,
    "cpo": CPO,
    "kto": KTO,
    "reward": RewardModel,
    "classifier": Classifier,
    "distill": Distill,
    "grpo": GRPO,
    "rloo": RLOO,
}
