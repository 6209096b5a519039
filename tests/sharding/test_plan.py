import pytest
import torch
from torch import nn

from lightning_ft.sharding.options import ShardingOptions
from lightning_ft.sharding.plan import plan_units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.linear(self.norm(inputs))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.embedding(inputs)
        for block in self.blocks:
            outputs = block(outputs)
        return self.head(outputs)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()
        self.scale = nn.Parameter(torch.ones(1))


def names(module: nn.Module, *, by_hand: bool = False, **options: object) -> list[str]:
    return [unit.name for unit in plan_units(module, ShardingOptions(**options), by_hand=by_hand)]  # type: ignore[arg-type]


def test_repeated_blocks_become_units_and_the_root_has_the_rest() -> None:
    module = Whole()
    units = plan_units(module, ShardingOptions())
    assert [unit.name for unit in units] == ["stack.blocks.0", "stack.blocks.1", "stack.blocks.2", ""]
    assert {"scale", "stack.embedding.weight", "stack.head.2.bias"} <= units[-1].parameters.keys()
    parameters = [parameter for unit in units for parameter in unit.parameters.values()]
    assert set(parameters) == set(module.parameters())
    assert len(parameters) == len(set(parameters)), "a parameter is in two units"
    assert units[0].num_bytes == 4 * units[0].num_elements == 4 * (4 + 4 + 16 + 4)


def test_small_layers_are_not_worth_a_gather_each() -> None:
    assert names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == [""]
    assert names(nn.Sequential(*(nn.Linear(1024, 1024, device="meta") for _ in range(2)))) == ["0", "1", ""]


def test_modules_that_share_a_parameter_with_others_belong_to_the_root() -> None:
    module = Stack()
    module.blocks[2].linear.weight = module.blocks[0].linear.weight
    assert names(module) == ["blocks.1", ""]
    module.blocks[1].norm = module.blocks[0].norm
    assert names(module) == [""]


def test_one_block_used_several_times_is_one_unit() -> None:
    module = Stack()
    module.blocks = nn.ModuleList([module.blocks[0], module.blocks[0], module.blocks[1]])
    assert names(module) == ["blocks.0", "blocks.2", ""]


def test_units_can_be_chosen_by_class_by_name_and_by_a_function() -> None:
    assert names(Whole(), units=[Stack, "LayerNorm"]) == [f"stack.blocks.{n}.norm" for n in range(3)] + ["stack", ""]
    assert names(Whole(), units=lambda name, module: name.endswith("head")) == ["stack.head", ""]
    assert names(Whole(), units=[]) == [""]


def test_by_hand_every_submodule_that_can_be_called_is_a_unit() -> None:
    module = nn.ModuleDict({"generator": Stack(), "others": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
    units = plan_units(module, ShardingOptions(), by_hand=True)
    assert [unit.name for unit in units] == [
        *(f"generator.blocks.{n}" for n in range(3)),
        "others.0",
        "others.1",
        "generator",
        "",
    ]
    assert not units[-1].parameters


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"units": "Block"}, "units='Block'"),
        ({"units": [3]}, "expected a list of classes"),
        ({"reshard_after_forward": 2}, "expected True, False or None"),
        ({"cpu_offload": None}, "expected True or False"),
        ({"mp_policy": "bf16"}, "expected a `MixedPrecisionPolicy`"),
    ],
)
def test_options_of_the_wrong_type_are_refused(options: dict[str, object], error: str) -> None:
    with pytest.raises(TypeError, match=error):
        ShardingOptions(**options)  # type: ignore[arg-type]
