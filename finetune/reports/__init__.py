"""Pages, plots and terminal output for users."""
