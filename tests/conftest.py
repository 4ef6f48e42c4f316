"""Settings of all tests."""

from hypothesis import settings

# Speed is measured in benchmarks/; a test that takes long on a busy machine is not wrong.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
