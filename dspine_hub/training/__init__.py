"""Train drafters (and the mini target): objective, blocks, data, and one loop on accelerate."""
