"""Serve a result over HTTP with OpenAI's API."""
