"""How processes train together: one file per engine that Accelerate drives."""
