"""Memory, time, communication and advice for a plan."""
