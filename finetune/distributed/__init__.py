"""Engines: how processes share a model, and detect that one is lost."""
