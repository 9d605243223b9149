"""Pages, pictures and terminal output for users."""
