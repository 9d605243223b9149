"""Prove on this machine that training is equivalent on every backend, by comparing real runs."""
