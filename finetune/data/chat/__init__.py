"""From messages to token ids, with the spans that are trained."""
