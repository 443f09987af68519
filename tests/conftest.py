"""Settings of the property tests.

By default they try the same examples every time, so that a change is judged by the change and not
by luck. `HYPOTHESIS_PROFILE=search pytest tests` looks for new ones.
"""

import os

from hypothesis import HealthCheck, settings

# A busy machine is no reason to fail.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}

settings.register_profile("same", derandomize=True, database=None, **PATIENT)
settings.register_profile("search", **PATIENT)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
