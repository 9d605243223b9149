"""Evaluate a trained model on held-out rows."""
