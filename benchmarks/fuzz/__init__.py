"""Change every file that the toolkit reads, at random, and see that it is read or refused."""
