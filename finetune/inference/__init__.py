"""Load a result and generate with it."""
