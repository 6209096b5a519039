import pickle

import pytest

from lightning_ft import errors

SAMPLES = [
    (errors.FaultToleranceError("x"), Exception, "x"),
    (errors.CollectiveMismatchError("barrier", [0], "broadcast", [1, 2]), RuntimeError, "ranks 1, 2 entered broadcast"),
    (errors.CollectiveTimeoutError("barrier", 2.5, [3]), TimeoutError, "waited 2.5 s for rank 3"),
    (errors.CollectiveTimeoutError("barrier", 2.5), TimeoutError, "for the other ranks"),
    (errors.ExcludedError(2, "it computes wrong results"), RuntimeError, "Slot 2 was excluded"),
    (errors.GroupBrokenError("connection closed by peer"), RuntimeError, "connection closed by peer"),
    (errors.NotEnoughReplicasError(1, 2, 30.0, "ckpt/step=100"), RuntimeError, "Still intact: ckpt/step=100."),
    (errors.NotEnoughReplicasError(1, 2), RuntimeError, "no checkpoint yet"),
    (errors.ReconfigurationError(7, 3, "no route to rank 1"), RuntimeError, "Generation 7 could not be set up (3"),
    (errors.StoppedError("two slots failed"), RuntimeError, "two slots failed"),
    (errors.SupervisorLostError("its connection closed"), ConnectionError, "its connection closed"),
    (errors.UnsupportedStateError("callbacks['A']", "it is an object", "Leave it out."), TypeError, "callbacks['A']"),
    (errors.GatheredParametersError("training_step", "aten.mul"), RuntimeError, "`training_step` used a parameter"),
    (errors.UnusedParametersError(["net.0.bias"]), RuntimeError, "no gradient of net.0.bias"),
    (
        errors.DiscontinuityError(9, "rejoin", "after the rejoin at step 9: nan"),
        RuntimeError,
        "Checkpoints of step 9 and before",
    ),
    (errors.ReplicaLostError(2, 3), RuntimeError, "2 of 3 ranks are left"),
    (
        errors.StateUnavailableError(1, "Traceback\n  line 3\nKeyError: 'x'\n"),
        RuntimeError,
        "joins: KeyError: 'x'\nTraceback",
    ),
    (errors.MalformedStateError("it ends early"), ValueError, "it ends early"),
    (errors.CheckpointNotCommittedError(200, "no space left"), RuntimeError, "step 200 was not committed: no space left."),
    (errors.CorruptedStateError(9, {1: ["w"]}, True, 6), RuntimeError, "after step 9 (slot 1: w). Most ranks agree"),
    (errors.CorruptedStateError(9, {0: "abcd", 1: "a"}, False, None), RuntimeError, "a, b, c and 1 more; slot 1: a). No"),
    (errors.DamagedCheckpointError("ckpt/a", "no manifest", "ckpt/b"), RuntimeError, "Still intact: ckpt/b."),
    (
        errors.StateNotLoadedError("rank 1: KeyError: 'x'"),
        RuntimeError,
        "Nothing was loaded on any rank: rank 1: KeyError: 'x'",
    ),
    (errors.WorldSizeChangedError("ckpt/a", 2, 3), RuntimeError, "ckpt/a is of 2 ranks, and there are 3"),
    (errors.DumpError("dumps/a", "it is cut off"), RuntimeError, "The dump dumps/a can't be read: it is cut off."),
    (
        errors.StoreUnreachableError("s3://bucket/a", "permission denied"),
        RuntimeError,
        "`s3://bucket/a` could not be reached: permission denied. Check the address",
    ),
    (errors.ResultRejectedError("loss is NaN", "nan", 7), RuntimeError, "Step 7 was rejected: loss is NaN (nan)"),
]


@pytest.mark.parametrize(("error", "builtin", "text"), SAMPLES)
def test_an_error_says_what_happened_and_survives_pickling(error: Exception, builtin: type, text: str) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.args == error.args
    assert vars(copy) == vars(error)
    assert text in str(copy) == str(error)
    assert isinstance(copy, errors.FaultToleranceError)
    assert isinstance(copy, builtin)


def test_every_error_of_the_tree_has_a_sample() -> None:
    tree = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert tree == {type(error) for error, _, _ in SAMPLES}
