"""How many examples Hypothesis makes: few in every run, many where `ACCEL_TEST_EXAMPLES=many` asks for them."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

MANY = "ACCEL_TEST_EXAMPLES"

# No deadline: how long an example takes says something of the machine, and of what else runs there.
settings.register_profile("few", deadline=None, max_examples=25)
settings.register_profile("many", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get(MANY, "few"))
