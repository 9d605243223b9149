"""Serve a result over HTTP, in the words of OpenAI's API."""
