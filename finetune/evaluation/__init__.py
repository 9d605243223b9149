"""Measure a result on held-out rows."""
