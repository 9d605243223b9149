"""What a run leaves for a person: metrics, what is on the screen, pictures, cards, the report."""
