"""Load a model, attach adapters, and check that it can be trained."""
