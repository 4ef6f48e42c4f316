"""intellect_node."""
