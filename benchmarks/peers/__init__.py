"""The same training by other toolkits and by this one, alternating optimizer steps."""
