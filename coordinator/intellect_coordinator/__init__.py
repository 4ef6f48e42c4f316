"""intellect_coordinator."""
