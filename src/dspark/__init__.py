"""dspark: does DSpark speculative decoding pay on my model, my GPU, my traffic?

Importing the package settles how OpenMP waits before torch is loaded: on shared cores a spinning
OpenMP team costs a factor of ten, so every job waits passively unless the user said otherwise, or a
measurement finds the cores free (`dspark.openmp`).
"""

import os

# A job inherits what the workflow around it has set, which is no word of the user's.
OPENMP_IS_OURS = (
    "DSPARK_OPENMP" in os.environ or not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
)
if OPENMP_IS_OURS:
    os.environ["DSPARK_OPENMP"] = "1"
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ.setdefault("GOMP_SPINCOUNT", "0")

__version__ = "0.1.0"
