"""The run directory: its files and their records."""
