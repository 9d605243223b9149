"""Log-probabilities of a reference model, stored or computed in a step."""
