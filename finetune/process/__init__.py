"""How a process of the toolkit starts, prints and ends."""
