"""What is selected, by names and phases."""

import pytest
from omegaconf import OmegaConf

from lightning_ft.dump.options import options_of
from lightning_ft.dump.selection import Selection


@pytest.mark.parametrize(
    ("patterns", "selected"),
    [
        (["*"], {"output:net.0", "input:net.0", "parameter:net.0.bias"}),
        (["output:*"], {"output:net.0"}),
        (["*:net.*", "!parameter:*"], {"output:net.0", "input:net.0"}),
        (["*@Linear"], {"output:net.0", "input:net.0"}),
        (["*@Conv*"], set()),
        (["!*"], set()),
    ],
)
def test_names_are_selected_by_patterns(patterns: list[str], selected: set[str]) -> None:
    selects = Selection(patterns)
    names = [("output", "net.0", "Linear"), ("input", "net.0", "Linear"), ("parameter", "net.0.bias", "")]
    assert {f"{kind}:{path}" for kind, path, cls in names if selects(kind, path, cls)} == selected


def test_a_phase_overrides_what_is_for_all() -> None:
    text = """
    filter: [output:*]
    every_n_rollouts: 2
    validate:
      filter: loss:*
      rollouts: [1, 3]
      every_n_rollouts: 1
    predict:
      enable: false
    """
    config = OmegaConf.create(text)
    train, validate, predict = (options_of(config, phase) for phase in ("train", "validate", "predict"))
    assert (train.filter, validate.filter, predict.filter) == (["output:*"], ["loss:*"], ["output:*"])
    assert [rollout for rollout in range(5) if train.selects(rollout)] == [0, 2, 4]
    assert [rollout for rollout in range(5) if validate.selects(rollout)] == [1, 3]
    assert not [rollout for rollout in range(5) if predict.selects(rollout)]
    assert options_of(None, "test").selects(0)
