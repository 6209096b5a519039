"""Every wrong argument ends in one error at once that names the call, the value and what was expected."""

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_ft
from lightning_ft import FTStrategy, SupervisionOptions
from lightning_ft.testing import Fault, FaultPlan

KILL = {"kind": "kill", "slot": 0, "point": "forward"}


@pytest.mark.parametrize(
    ("make", "arguments", "error", "message"),
    [
        (FTStrategy, {"max_restarts": -1}, ValueError, r"`FTStrategy\(max_restarts=-1\)` .* expected an integer, 0 or more"),
        (FTStrategy, {"max_restarts": 1.5}, TypeError, r"max_restarts=1.5.*expected an integer"),
        (FTStrategy, {"max_restarts": True}, TypeError, r"max_restarts=True.*expected an integer"),
        (FTStrategy, {"max_restarts": None}, TypeError, r"max_restarts=None.*expected an integer"),
        (FTStrategy, {"min_replicas": 0}, ValueError, r"min_replicas=0.*expected an integer, 1 or more"),
        (FTStrategy, {"min_replicas": True}, TypeError, r"min_replicas=True.*expected an integer"),
        (FTStrategy, {"min_replicas": "2"}, TypeError, r"min_replicas='2'.*expected an integer"),
        (FTStrategy, {"timeout": 0}, ValueError, r"`FTStrategy\(timeout=0.*expected seconds, more than 0, or None"),
        (FTStrategy, {"timeout": -2.5}, ValueError, r"timeout=-2.5.*more than 0"),
        (FTStrategy, {"timeout": "5"}, TypeError, r"timeout='5'.*expected seconds"),
        (FTStrategy, {"timeout": math.nan}, ValueError, r"timeout=nan.*more than 0"),
        (FTStrategy, {"timeout": math.inf}, ValueError, r"timeout=inf.*at most 1e\+09"),
        (FTStrategy, {"timeout": timedelta(seconds=-1)}, ValueError, r"timeout=-1.0.*more than 0"),
        (FTStrategy, {"timeout": timedelta.max}, ValueError, r"timeout=.*at most 1e\+09"),
        (FTStrategy, {"global_batch": "fixed"}, ValueError, r"global_batch='fixed'.*expected one of 'shrink', 'constant'"),
        (FTStrategy, {"spares": -1}, ValueError, r"spares=-1.*expected an integer, 0 or more"),
        (FTStrategy, {"spares": 0.5}, TypeError, r"spares=0.5.*expected an integer"),
        (FTStrategy, {"spares": 1, "max_restarts": 0}, ValueError, r"spares=1, max_restarts=0.*Use `spares=0`"),
        (FTStrategy, {"supervision": {}}, TypeError, r"supervision=\{\}.*expected `SupervisionOptions\(...\)`"),
        (FTStrategy, {"supervision": SupervisionOptions}, TypeError, r"expected `SupervisionOptions\(...\)`"),
        (FTStrategy, {"find_unused_parameters": "yes"}, TypeError, r"find_unused_parameters='yes'.*True or False"),
        (FTStrategy, {"max_restart": 1}, TypeError, r"unexpected keyword argument 'max_restart'"),
        (SupervisionOptions, {"grace": -1}, ValueError, r"`SupervisionOptions\(grace=-1\)`.*seconds, 0 or more"),
        (SupervisionOptions, {"grace": "1"}, TypeError, r"grace='1'.*seconds, 0 or more"),
        (SupervisionOptions, {"restart_window": None}, TypeError, r"restart_window=None.*seconds, 0 or more"),
        (SupervisionOptions, {"rejoin_timeout": math.nan}, ValueError, r"rejoin_timeout=nan.*seconds, 0 or more"),
        (SupervisionOptions, {"setup_timeout": 0}, ValueError, r"setup_timeout=0.*more than 0, or None"),
        (SupervisionOptions, {"checkpoint_timeout": True}, TypeError, r"checkpoint_timeout=True.*more than 0"),
        (SupervisionOptions, {"stall_timeout": math.inf}, ValueError, r"stall_timeout=inf.*at most"),
        (SupervisionOptions, {"start_method": "thread"}, ValueError, r"start_method='thread'.*'auto', 'fork', 'spawn'"),
        (SupervisionOptions, {"prefix_output": "no"}, ValueError, r"prefix_output='no'.*True, False, None"),
        (Fault, {**KILL, "slot": -1}, ValueError, r"`Fault\(slot=-1\)`.*expected an integer, 0 or more"),
        (Fault, {**KILL, "slot": "0"}, TypeError, r"`Fault\(slot='0'\)`.*expected an integer"),
        (Fault, {**KILL, "step": -1}, ValueError, r"`Fault\(step=-1\)`.*expected an integer, 0 or more"),
        (Fault, {**KILL, "occurrence": None}, TypeError, r"`Fault\(occurrence=None\)`.*expected an integer"),
        (Fault, {**KILL, "rendezvous": 1}, TypeError, r"`Fault\(rendezvous=1\)`.*True or False"),
        (Fault, {**KILL, "error": None}, TypeError, r"`Fault\(error=None\)`.*the name of a builtin exception"),
        (FaultPlan, {"timeout": 0}, ValueError, r"`FaultPlan\(timeout=0\)`.*seconds, more than 0"),
        (FaultPlan, {"faults": [{**KILL, "kind": "trip"}]}, ValueError, r"`Fault\(kind='trip'\)`.*kill, stop, exit, raise"),
    ],
)
def test_wrong_argument_is_named_with_its_value_and_what_was_expected(
    make: Callable[..., Any], arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"strategy": {"min_replicas": 3}}, MisconfigurationException, r"min_replicas=3.*devices=2.*expected 1 to 2"),
        ({"strategy": {"spares": 1}, "devices": 1}, MisconfigurationException, r"spares=1.*devices=1.*more devices"),
        ({"num_nodes": 2}, MisconfigurationException, r"num_nodes=2.*expected 1"),
        ({"strategy": "ft_x"}, ValueError, r"strategy='ft_x'"),
        ({"devices": [0, 2]}, TypeError, r"`devices` selected with `CPUAccelerator` should be an int > 0"),
        ({"devices": -1}, TypeError, r"`devices` selected with `CPUAccelerator` should be an int > 0"),
        ({"accelerator": "gpu"}, MisconfigurationException, r"No supported gpu backend found"),
        ({"accelerator": "cuda"}, MisconfigurationException, r"`CUDAAccelerator` can not run on your system"),
    ],
)
def test_wrong_combination_is_refused_when_the_trainer_is_made(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    strategy = arguments.pop("strategy", {})
    strategy = FTStrategy(**strategy) if isinstance(strategy, dict) else strategy
    with pytest.raises(error, match=message):
        Trainer(**{"accelerator": "cpu", "devices": 2, "strategy": strategy, "logger": False, **arguments})


def test_number_of_devices_may_be_left_to_lightning() -> None:
    assert lightning_ft.FTStrategy is FTStrategy
    assert Trainer(accelerator="cpu", devices="auto", strategy="ft", logger=False).num_devices == 1


def test_strategy_works_for_one_trainer() -> None:
    strategy = FTStrategy()
    Trainer(devices=1, strategy=strategy, logger=False)
    with pytest.raises(MisconfigurationException, match=r"set through FTStrategy class"):  # Lightning's words
        Trainer(devices=1, strategy=strategy, logger=False)
