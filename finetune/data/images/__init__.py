"""Images in rows: their files, their tokens, and the tensors of a micro-batch."""
