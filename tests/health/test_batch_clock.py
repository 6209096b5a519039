"""What counts as the time of a step, with a clock that is set by hand."""

from lightning_ft.health.batch_clock import BatchClock


def test_batches_of_a_step_add_up_without_what_is_counted_by_itself():
    now = [0.0]
    clock = BatchClock(lambda: now[0])

    def spend(seconds: float) -> None:
        now[0] += seconds

    spend(50.0)
    clock.start()
    for _ in range(2):
        spend(1.0)  # fetches
        clock.begin_forward()
        spend(2.0)
        clock.end_forward()
        spend(4.0)
        clock.end_batch()
        clock.begin_aside()
        spend(100.0)  # evaluates
        clock.end_aside()
        clock.end_aside()
    assert (clock.seconds, clock.forward) == (14.0, 4.0)
    clock.clear()
    spend(10.0)
    clock.end_batch(aside=9.0)
    assert (clock.seconds, clock.forward) == (1.0, 0.0)
