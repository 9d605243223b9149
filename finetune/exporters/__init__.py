"""Exporters by name: each writes a checkpoint in a format that other libraries load."""

EXPORTERS: dict[str, str] = {
    "adapter": "finetune.exporters.adapter:write",
    "merged": "finetune.exporters.whole_model:write_merged",
    "model": "finetune.exporters.whole_model:write",
    "vllm": "finetune.exporters.adapter:write",
    "nf4": "finetune.exporters.nf4:write",
    "gguf": "finetune.exporters.gguf:write",
    "ollama": "finetune.exporters.ollama:write",
}
"""`module:function` of each exporter, imported when it is used."""

CHECKS: dict[str, str] = {
    "adapter": "finetune.exporters.adapter:check",
    "merged": "finetune.exporters.whole_model:check_merged",
    "model": "finetune.exporters.whole_model:check",
    "vllm": "finetune.exporters.vllm:check",
    "nf4": "finetune.exporters.whole_model:check_whole",
    "gguf": "finetune.exporters.gguf:check",
    "ollama": "finetune.exporters.ollama:check",
}
"""`module:function` that rejects a checkpoint before anything is evaluated, merged or written."""
