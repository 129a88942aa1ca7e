"""What all tests share."""

from hypothesis import HealthCheck, settings

# On a busy machine the clock says nothing about the code.
settings.register_profile("kuberoll", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kuberoll")
