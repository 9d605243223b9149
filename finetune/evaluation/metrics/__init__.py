"""Metrics of answers by name; each defines which rows it supports and what it measures."""

METRICS: dict[str, str] = {
    "exact": "finetune.evaluation.metrics.words:EXACT",
    "number": "finetune.evaluation.metrics.words:NUMBER",
    "labels": "finetune.evaluation.metrics.words:LABELS",
    "f1": "finetune.evaluation.metrics.words:F1",
    "rouge": "finetune.evaluation.metrics.overlap:ROUGE",
    "bleu": "finetune.evaluation.metrics.overlap:BLEU",
    "chrf": "finetune.evaluation.metrics.overlap:CHRF",
    "json": "finetune.evaluation.metrics.structured:JSON",
    "tools": "finetune.evaluation.metrics.structured:TOOLS",
    "code": "finetune.evaluation.metrics.code:CODE",
    "sql": "finetune.evaluation.metrics.sql:SQL",
}
"""`module:attribute` of each `metric.Metric`, imported when it is used. Metrics are selected
automatically in this order, and the first one decides which answers got better or worse."""
