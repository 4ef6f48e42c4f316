"""Where version 0 of a policy comes from: `registry` turns `--model tiny|smollm2|PATH` into a folder."""
