"""The run directory: its files, and the records in them."""
