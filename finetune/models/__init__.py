"""Load a model, give it adapters, and check that it can be trained."""
