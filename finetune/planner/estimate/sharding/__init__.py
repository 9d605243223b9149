"""Memory of each sharding engine."""
