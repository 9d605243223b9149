"""Rows that are prepared while steps run, from sources that need not fit on a disk."""
