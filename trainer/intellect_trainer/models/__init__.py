"""Where version 0 of a policy comes from: made on the spot (`tiny`), from a package (`smollm2`), or a folder."""
