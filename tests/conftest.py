"""What all tests share: property tests have no deadline, since a busy machine is no failure."""

from hypothesis import settings

settings.register_profile("course", settings(deadline=None))
settings.load_profile("course")
