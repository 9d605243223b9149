"""Model shapes, read from configs or from a table of published models."""
