"""Translate preference methods of other toolkits: names, weights and data formats."""

from collections.abc import Mapping
from typing import Any, get_args

from finetune.errors import FinetuneError
from finetune.importers.translation import Translation, listed, shown, text
from finetune.methods.dpo import PairLoss

AXOLOTL = {
    "dpo": {"method": "dpo"},
    "ipo": {"method": "dpo", "loss_type": "ipo"},
    "orpo": {"method": "orpo"},
    "simpo": {"method": "simpo"},
    "kto": {"method": "kto"},
}
"""Recipe fields, by axolotl's `rl`."""
LLAMA_FACTORY = {
    "sigmoid": {"method": "dpo"},
    "hinge": {"method": "dpo", "loss_type": "hinge"},
    "ipo": {"method": "dpo", "loss_type": "ipo"},
    "orpo": {"method": "orpo"},
    "simpo": {"method": "simpo"},
}
"""Recipe fields, by LLaMA-Factory's `pref_loss`."""

FIELDS = {
    "rl_beta": ("beta", ("dpo", "orpo", "simpo", "kto")),
    "orpo_alpha": ("beta", ("orpo",)),
    "pref_beta": ("beta", ("dpo", "orpo", "simpo", "kto")),
    "pref_ftx": ("sft_weight", ("dpo", "simpo")),
    "rpo_alpha": ("sft_weight", ("dpo",)),
    "cpo_alpha": ("sft_weight", ("simpo",)),
    "dpo_label_smoothing": ("label_smoothing", ("dpo",)),
    "simpo_gamma": ("gamma", ("simpo",)),
    "kto_desirable_weight": ("desirable_weight", ("kto",)),
    "kto_undesirable_weight": ("undesirable_weight", ("kto",)),
    "kto_chosen_weight": ("desirable_weight", ("kto",)),
    "kto_rejected_weight": ("undesirable_weight", ("kto",)),
}
"""Our field and the methods that have it, by keys of both toolkits; later keys go before."""
BY_PAIR = "sft_weight: the mean over a pair's tokens, not a batch's"
ADDED = ("pref_ftx", "rpo_alpha", "cpo_alpha")
"""Keys that add a cross-entropy to the loss."""

REFUSED = {
    "loss_type=sigmoid_norm is normalized by length": "dpo_norm_loss",
    "all pairs have equal weight": "dpo_use_weighting",
    "logits are computed where they are needed": "dpo_use_logits_to_keep",
    "reference=start is the model before training": "ref_model ref_model_adapters",
}

PAIR_TYPES: dict[str, tuple[str, dict[str, str]]] = {
    "ultra": ("preference", {}),
    "argilla_chat": ("preference", {}),
    "intel": ("alpaca_preference", {"question": "instruction"}),
    "argilla": (
        "alpaca_preference",
        {"chosen_response": "chosen", "rejected_response": "rejected"},
    ),
    "default": ("preference", {"messages": "prompt"}),
    "chat_template": ("preference", {"input": "prompt"}),  # of bradley_terry
}
"""Format and columns, by the suffix of axolotl's type of a source, such as `chatml.intel`."""
JUDGED_TYPES: dict[str, tuple[str, dict[str, str]]] = {
    "ultra": ("kto", {"prompt": "question", "completion": "answer"}),
    "intel": ("kto", {"question": "question", "completion": "answer"}),
    "argilla": ("kto", {"instruction": "question", "completion": "answer"}),
    "argilla_chat": ("kto", {"completion": "messages"}),
}
"""Format and columns for `rl: kto`, by the suffix of the type."""
RANKED = {
    "alpaca": "alpaca_preference",
    "sharegpt": "sharegpt_preference",
    "messages": "preference",
}
"""The format of pairs, by the format of their prompts."""


def method(job: Translation, key: str, name: str, fields: Mapping[str, str]) -> None:
    """Set the method of a recipe, and record the outcome of the key that names it."""
    for field, value in fields.items():
        job.set(field, value)
    reason = ", ".join(f"{field}={value}" for field, value in fields.items())
    job.say(key, "translated", reason)
    for theirs, (field, methods) in FIELDS.items():
        if fields["method"] in methods:
            job.move(theirs, field)
            if theirs in ("rpo_alpha", "cpo_alpha"):
                job.say(theirs, "differs", BY_PAIR)
        elif theirs in ADDED:
            reason = f"method {fields['method']} cannot add this loss: it differs"
            job.refuse_flags({reason: theirs})
        else:
            job.say(theirs, "not needed", f"{name} does not read it")
    if fields["method"] == "simpo":
        for field, theirs, value in (
            ("beta", ("rl_beta", "pref_beta"), 0.1),
            ("gamma", ("simpo_gamma",), 0.5),
            *([("sft_weight", ("cpo_alpha",), 1.0)] if key == "rl" else []),  # TRL's CPOConfig
        ):
            if not any(each in job.source for each in theirs):
                job.assume(field, value)
    if "orpo_alpha" in job.source:
        job.say("rl_beta", "not needed", "orpo_alpha replaces it")
    job.refuse_flags(REFUSED)


def losses_of_dpo(job: Translation) -> None:
    """Translate `loss_type`, one or several, and `loss_weights`, whose names are TRL's."""
    names = [text(each) for each in listed(job.get("loss_type", "sigmoid"))]
    if set(names) <= set(get_args(PairLoss)):
        job.set("loss_type", names[0] if len(names) == 1 else list(names))
        outcome = "differs" if "sft" in names else "translated"
        reason = "; sft is the mean over a pair's tokens, not a batch's" * ("sft" in names)
        job.say("loss_type", outcome, f"loss_type={','.join(names)}{reason}")
        job.move("loss_weights", "loss_weights", listed)


def axolotl_format(job: Translation, at: str, values: dict[str, Any], data: dict[str, Any]) -> None:
    """Set the format and columns of a source from its `type`."""
    kind = values.get("type", "chat_template.default")
    word = text(kind).rpartition(".")[2]
    is_judged = job.fields.get("method") == "kto"
    known = JUDGED_TYPES if is_judged else PAIR_TYPES
    if isinstance(kind, dict) or word not in known:
        reason = "format 'kto' or 'preference' with `columns` reads it; see docs/formats.md"
        job.say(f"{at}.type", "no counterpart", f"{shown(kind)}: {reason}")
        data["format"] = "kto" if is_judged else "preference"
        return
    data["format"], columns = known[word]
    names = {"field_messages": "prompt", "field_chosen": "chosen", "field_rejected": "rejected"}
    if word == "default":
        columns = {} if "field_messages" in values else columns
        columns |= {text(values[key]): name for key, name in names.items() if key in values}
        for key in names:
            if key in values:
                job.say(f"{at}.{key}", "translated", f"column {names[key]}")
    columns = {theirs: ours for theirs, ours in columns.items() if theirs != ours}
    if columns:
        data["columns"] = columns
    reason = f"format={data['format']}: the model's own chat template renders it"
    job.say(f"{at}.type", "differs" if "." in text(kind) else "translated", reason)


def refuse_unpaired(at: str, values: Mapping[str, Any], chosen: str) -> None:
    """Reject a LLaMA-Factory data set that does not fit its method.

    Raises:
        FinetuneError: pairs for supervised fine-tuning, or no pairs for a method that needs them.
    """
    ranking = bool(values.get("ranking"))
    if chosen in ("sft", "pretrain") and ranking:
        raise FinetuneError(f"{at}: a preference data set (ranking), which {chosen} cannot use")
    if chosen not in ("sft", "pretrain", "kto") and not ranking:
        raise FinetuneError(f"{at}: not a preference data set (ranking), which {chosen} needs")
