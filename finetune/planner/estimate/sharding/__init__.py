"""What each sharding engine keeps in memory."""
