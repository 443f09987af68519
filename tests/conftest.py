"""Settings of all tests: property tests never fail because the machine is busy."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "repo", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("repo")
