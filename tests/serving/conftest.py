import pytest

from subnetact.serving.simulation.datasets import superserve_a40


@pytest.fixture(scope="session")
def a40():
    return superserve_a40()
