"""Quickstart, part 1: a two-layer Llama from scratch on generated orders with notes."""

from finetune import Data, Model, Pretrain

recipe = (
    Pretrain(
        Model(
            config={
                "model_type": "llama",
                "vocab_size": 1536,
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "num_key_value_heads": 8,
                "max_position_embeddings": 256,
                "tie_word_embeddings": True,
                "initializer_range": 0.08,
                "pad_token_id": 0,
                "bos_token_id": None,
                "eos_token_id": 2,
            },
            tokenizer="quickstart/tokenizer",
        ),
    )
    .with_data(Data("quickstart/data/corpus.jsonl", "text"))
    .with_batch(rows=32, micro_rows=16, max_length=128)
    .with_optim(
        lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05, min_lr=0.1, warmup=40, schedule="linear"
    )
)
