from typing import Any

import pytest

from lightning_ft.data.position import LoaderState, resume_batches


class Corpus:
    seed, rank, world_size = 3, 1, 2

    def epoch_batches(self, epoch: int) -> Any:
        return (f"{epoch}.{index}" for index in range(5))


class Lazy(Corpus):
    def epoch_batches(self, epoch: int) -> Any:
        return range(10**9)  # nobody could read it up to there


STATE = LoaderState(seed=3, epoch=4, rank=1, world_size=2, batch_idx=3)


def test_a_corpus_continues_behind_the_batches_that_were_trained() -> None:
    assert list(resume_batches(Corpus(), STATE)) == ["4.3", "4.4"]
    assert next(resume_batches(Lazy(), STATE.advanced(10**8))) == 10**8 + 3


def test_a_state_survives_its_description() -> None:
    assert LoaderState.from_dict(STATE.to_dict()) == STATE


@pytest.mark.parametrize(("name", "value"), [("epoch", -1), ("rank", 2), ("batch_idx", -1)])
def test_a_state_out_of_range_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        LoaderState(**{**STATE.to_dict(), name: value})
    with pytest.raises(TypeError, match=f"{name}=True"):
        LoaderState(**{**STATE.to_dict(), name: True})


def test_a_corpus_of_another_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="rank=0, but this one has rank=1"):
        resume_batches(Corpus(), LoaderState(3, 4, 0, 2, 3))
