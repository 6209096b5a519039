import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the job imports the table by the same names

from running import Batches


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard-size", type=int, default=0, help="run all rows with sharded modules, too; 2")


@pytest.fixture(scope="session")
def batches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Batches:
    items = [item for item in request.session.items if getattr(item, "callspec", None) is not None]
    names = list(dict.fromkeys(item.callspec.params["row"].name for item in items if "row" in item.callspec.params))
    return Batches(names, tmp_path_factory.mktemp("parity"))
