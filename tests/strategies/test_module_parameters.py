from torch import nn

from lightning_ft.strategies.module_parameters import ModuleParameters


def test_parameters_that_come_later_are_seen():
    module = nn.Sequential(nn.Linear(2, 2))
    parameters = ModuleParameters(module)
    assert list(parameters) == list(module.parameters())
    known = list(parameters)
    module.append(nn.Linear(2, 2))
    assert [p is q for p, q in zip(parameters, module.parameters(), strict=True)] == [True] * 4
    module[0].weight = nn.Parameter(known[0].detach().clone())
    assert next(iter(parameters)) is module[0].weight is not known[0]
    parameters.close()
    parameters.close()
