"""intellect_protocol."""
