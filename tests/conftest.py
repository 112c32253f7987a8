"""For all tests: threads that do not spin while they wait.

With more busy processes than cores, spinning makes small models ten times slower. OpenMP reads this when torch loads.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
