import io

import torch

from lightning_ft.checkpoint.image import pickled


def test_objects_come_back_as_they_are_now_and_of_their_types_however_alike_others_are() -> None:
    options = [0.1, 0.1]
    values = [1, True, 1.0, 0.0, -0.0, None, "1", (1, True, (0.0,)), (1, 1, (-0.0,)), (True, 1, (0.0,)), options]
    for _ in range(2):
        options[0] += 1
        saved = pickled((str(number), value) for number, value in enumerate(values))
        for number, value in enumerate(values):
            assert repr(torch.load(io.BytesIO(saved[str(number)]), weights_only=True)) == repr(value)
