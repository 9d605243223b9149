"""Shows on this machine that a backend changes nothing: real processes, read back and compared."""
