from lightning_ft.data.shares import EvaluationShares


def test_what_a_dead_rank_held_is_dealt_to_the_live_ones_and_again_if_one_of_them_dies() -> None:
    shares = EvaluationShares({0: 3, 1: 2, 2: 3})
    assert shares.hand_over([0, 2]) == [{0: (1, 0), 2: (1, 1)}]
    assert shares.hand_over([0, 2]) == []
    assert [turn[2] for turn in shares.hand_over([2])] == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_turns_are_the_same_for_all_and_the_last_may_be_uneven() -> None:
    shares = EvaluationShares({slot: 3 for slot in range(3)})
    assert shares.hand_over([0, 2]) == [{0: (1, 0), 2: (1, 1)}, {0: (1, 2), 2: None}]
