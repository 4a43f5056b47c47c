from __future__ import annotations

from tests.slurm.conftest import accounting, cluster, make_cluster, pytest_runtest_makereport, slurm  # noqa: F401
