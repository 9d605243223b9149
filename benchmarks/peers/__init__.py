"""The same training by other toolkits and by ours, an optimizer step of each in turn."""
