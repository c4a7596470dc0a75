"""What holds for every test."""

import atexit
import os
import shutil
import tempfile

import hypothesis
import jax

# The commands keep what they compile in the user's cache directory: not in that of whoever runs the tests.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="tfm-cache-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# A sum of arrays of different rank is a mistake more often than a wish; the library says which axes it means.
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example of a property compiles for seconds, so there is no deadline; on CI the examples are the same ones
# every time, so that a failure there is of the change and not of chance.
_checks = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("local", deadline=None, suppress_health_check=_checks)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("local"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")
