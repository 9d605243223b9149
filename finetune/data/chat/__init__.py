"""Render messages to token ids and find the trained spans."""
