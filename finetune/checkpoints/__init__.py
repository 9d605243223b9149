"""Write and read checkpoints, and decide which run may be resumed."""
