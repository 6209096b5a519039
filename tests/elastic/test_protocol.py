from lightning_ft.elastic.options import Policy
from lightning_ft.elastic.protocol import RankEnvironment


def test_rank_environment_survives_the_environment() -> None:
    environment = RankEnvironment(
        slot=2, incarnation=1, num_slots=4, supervisor="@x", store="@y", run_id="a", memory="1:5,6"
    )
    assert RankEnvironment.from_environ({"HOME": "/", **environment.to_environ()}) == environment
    assert RankEnvironment.from_environ({"HOME": "/"}) is None


def test_policy_survives_the_channel() -> None:
    policy = Policy(max_restarts=7, timeout=2.5, prefix_output=False)
    assert Policy.from_message({**policy.to_message(), "from_a_newer_version": 1}) == policy  # type: ignore[typeddict-unknown-key]
