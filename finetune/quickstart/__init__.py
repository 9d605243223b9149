"""The main job in minutes on a laptop: generated data, a small base model, QLoRA, a comparison."""
