"""Read rows of files and of the hub."""
