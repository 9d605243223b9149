"""Starts the processes of a job."""
