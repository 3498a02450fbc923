"""dspark: does DSpark speculative decoding pay on my model, my GPU, my traffic?

Importing the package settles how OpenMP waits before torch is loaded: on shared cores a spinning
OpenMP team costs a factor of ten, so every job waits passively unless the user said otherwise, or a
measurement finds the cores free (`dspark.openmp`).
"""

import os

OPENMP_IS_OURS = not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ.setdefault("GOMP_SPINCOUNT", "0")

__version__ = "0.1.0"
