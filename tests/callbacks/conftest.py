"""What the tests of callbacks share: a fit that is resumed from its own checkpoints."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def resumed() -> ModuleType:
    """The module ``jobs/resumed.py``, which is also the program of jobs with several ranks."""
    spec = importlib.util.spec_from_file_location("resumed", Path(__file__).parent / "jobs" / "resumed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
