"""Makes the modules of scripts/gpu_check and scripts/profile_gpu importable, as these do."""

import sys

from tests.conftest import ROOT

sys.path += [str(ROOT), str(ROOT / "benchmarks")]
