"""Check that promises hold: proofs, memory, and the doctor."""
