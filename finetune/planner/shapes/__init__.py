"""Shapes of models, read from their configs or as published."""
