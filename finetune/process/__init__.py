"""Start, output, signals and exit of the toolkit's processes."""
