"""intellect_trainer."""
