"""The main job in minutes on a laptop: generated data, a small base, QLoRA, and what it changed."""
