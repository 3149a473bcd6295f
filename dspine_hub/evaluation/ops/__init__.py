"""`bench ops`: DSpine's own work of a round, checked against float64, then timed."""
