import math

import pytest
import torch

from lightning_ft.testing import Corruption


@pytest.mark.parametrize(("kind", "value"), [(k, 0.5) for k in ("nan", "inf", "spike", "bit_flip")] + [("bit_flip", 3.0)])
def test_the_largest_element_goes_wrong_and_no_other(kind: str, value: float) -> None:
    values = torch.tensor([0.1, -value, 0.2], requires_grad=True)
    wrong = Corruption(kind=kind, where="loss", batch_idx=0).corrupt(values)
    assert torch.equal(wrong[::2], values[::2])
    assert not abs(float(wrong.detach()[1])) <= 1e5
    assert wrong.requires_grad
    with pytest.raises(ValueError, match="expected one of"):
        Corruption(kind="typo", where="loss", batch_idx=0)
    assert math.isfinite(float(values.detach().sum()))
