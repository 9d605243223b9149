"""Simulate the memory that autograd needs for a layer and for the head."""
