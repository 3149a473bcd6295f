"""Templates and facts of model cards."""
