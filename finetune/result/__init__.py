"""What becomes of a trained run: it is loaded, asked, scored and exported."""
