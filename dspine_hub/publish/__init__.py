"""Make a bundle, check it as a stranger would, describe it, and bring it to a Hub."""
