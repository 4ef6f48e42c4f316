"""Parts of `honest.py`: `settings` says who computes how, `bench` makes and judges units, `table` counts."""
