"""Exporters by name: each writes a checkpoint in a form that other libraries load."""

EXPORTERS: dict[str, str] = {
    "adapter": "finetune.exporters.adapter:write",
    "merged": "finetune.exporters.model:write_merged",
    "model": "finetune.exporters.model:write",
    "vllm": "finetune.exporters.vllm:write",
    "nf4": "finetune.exporters.nf4:write",
    "gguf": "finetune.exporters.gguf:write",
    "ollama": "finetune.exporters.ollama:write",
}
"""`module:function` of each, imported when it is used."""
