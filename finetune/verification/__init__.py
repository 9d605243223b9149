"""Verify promises: proofs of backends, memory plans against traces, and the doctor."""
