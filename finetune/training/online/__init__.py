"""Steps of online methods: sample completions, score them, compute advantages."""
