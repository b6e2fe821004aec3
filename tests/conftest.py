"""Settings for the whole suite."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Two shared cores: an example may be slow without being wrong.
settings.register_profile("troupe", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("troupe")
