"""How the mathematics of a model is computed: one module a lever, chosen by the plan."""
