"""A small version of benchmarks/chaos.py: faults at random, and nothing may show."""

import pytest
from benchmarks.chaos import chaos


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_forty_faults_leave_no_trace() -> None:
    assert chaos(faults=40, seed=1000) == 0
