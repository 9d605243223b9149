"""Change files that the toolkit reads at random, and check that they are read or rejected."""
