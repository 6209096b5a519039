"""The program of a rank that :func:`~lightning_ft.testing.run_ranks` starts."""

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_ft.elastic.local import LocalEngine
from lightning_ft.elastic.options import Policy
from lightning_ft.elastic.protocol import RankEnvironment


def main(request: dict[str, Any]) -> None:
    """Call the requested function with this rank's engine and write down what it returns."""
    environment = RankEnvironment.of_process()
    assert environment is not None, "this is no rank"
    directory = Path(request["directory"])
    policy = Policy(max_restarts=request["max_restarts"], timeout=request["timeout"], shard_size=request["shard_size"])
    engine = LocalEngine.of_process(environment, policy, timedelta(seconds=request["timeout"]))
    engine.events.open(directory / "events")
    engine.report_log(str(directory / "events"))
    engine.begin_call("fit")
    try:
        result = _load(request["file"], request["function"])(engine, *request["args"])
        engine.end_call()
    except BaseException as error:
        engine.report_exception(error)
        raise
    path = directory / f"result_{environment.slot}.json"
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(result))
    unfinished.replace(path)


def _load(file: str, function: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location("target_of_run_ranks", file)
    assert spec is not None, f"{file} is no Python file"
    assert spec.loader is not None, f"{file} is no Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    target: Any = module
    for name in function.split("."):
        target = getattr(target, name)
    return target  # type: ignore[no-any-return]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
