"""Keys of other toolkits for models that read images."""

from typing import Any

from finetune.importers.translation import Translation, text

PARTS = ["language", "connector", "tower"]
AUDIO = ("Voxtral", "Qwen2Audio")
"""Starts of the names of processors for sounds."""
SWIFT = {
    "freeze_llm": ("language", False),
    "freeze_aligner": ("connector", True),
    "freeze_vit": ("tower", True),
}
"""The same by ms-swift's keys (`tuner_args.py`)."""
FROZEN = {
    "freeze_language_model": ("language", False),
    "freeze_multi_modal_projector": ("connector", True),
    "freeze_vision_tower": ("tower", True),
}
"""Part of a model and default by LLaMA-Factory's keys (`finetuning_args.py`)."""
RESIZED = "the image processor resizes; set model.processor_kwargs to limit the pixels of an image"


def axolotl(job: Translation) -> None:
    """Translate `processor_type` and what belongs to it; without it, text alone is read."""
    processor = text(job.get("processor_type", ""))
    if not processor or processor.startswith(AUDIO):
        return
    job.put("model.reads", ["image"], "processor_type")
    job.say("skip_prepare_dataset", "not needed", "prepared rows have no pixels")
    job.say("image_size image_resize_algorithm", "differs", RESIZED)
    names = text(job.get("lora_target_modules", ""))
    alone = job.get("freeze_mm_modules") or (job.get("adapter") and "language_model" in names)
    parts = ["language"] if alone or job.get("lora_target_linear") else PARTS
    job.put("model.trains", parts, "freeze_mm_modules")


def llamafactory(job: Translation) -> None:
    """Translate keys of images, if there are some or a data set has them; else text is read."""
    if "image_max_pixels" not in job.source and "reads" not in job.fields["model"]:
        return
    job.set("model.reads", ["image"])
    job.say("image_max_pixels", "differs", f"model.reads=[image]; {RESIZED}")
    job.say("video_max_pixels", "not needed", "videos are refused")
    job.say("media_dir", "differs", "paths of images begin at the folder of their file")
    _trained(job, FROZEN)


def swift(job: Translation) -> None:
    """Translate keys of images if a part for images is trained, or they are resized."""
    frozen = job.get("freeze_vit", True) and job.get("freeze_aligner", True)
    if frozen and not job.get("freeze_llm") and "max_pixels" not in job.source:
        keys = " ".join([*SWIFT, "vit_lr", "aligner_lr", "vit_gradient_checkpointing"])
        job.say(keys, "differs", "text is read; for images set model.reads=[image]")
        return
    job.set("model.reads", ["image"])
    parts = _trained(job, SWIFT)
    job.say("vit_gradient_checkpointing", "not needed", "recomputation gives equal gradients")
    job.say("max_pixels", "differs", RESIZED)
    groups = list[dict[str, Any]]()
    for key, part, match in (
        ("aligner_lr", "connector", "merger|projector|connector|aligner"),
        ("vit_lr", "tower", "visual|vision"),
    ):
        if part not in parts:
            job.say(key, "not needed", f"the {part} is frozen")
        elif key in job.source:
            groups.append({"match": match, "lr": job.source[key]})
            job.say(key, "translated", "optim.groups")
    if groups:
        job.set("optim.groups", groups)


def _trained(job: Translation, keys: dict[str, tuple[str, bool]]) -> list[str]:
    parts = [part for key, (part, usual) in keys.items() if not job.get(key, usual)]
    job.put("model.trains", parts, " ".join(keys))
    return parts


def trl(job: Translation) -> None:
    """Let a script of TRL read images, which trains all parts."""
    job.set("model.reads", ["image"])
    job.set("model.trains", PARTS)
