"""Predict memory, time and communication of a plan, and give advice."""
