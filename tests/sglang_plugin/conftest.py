"""Stand-ins for SGLang, and the bundle that is served."""

import pytest
from helpers.sglang_stand_ins import stand_in_modules


@pytest.fixture
def stand_ins(monkeypatch):
    return stand_in_modules(monkeypatch)


@pytest.fixture(scope="session")
def bundle(mini_bundle):
    return str(mini_bundle)
