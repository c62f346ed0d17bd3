"""Metrics add up, in threads too, and a snapshot is a copy."""

import threading

import pytest

from pagefold.core.metrics import Metrics


def test_counters_add_and_gauges_are_set():
    metrics = Metrics()
    metrics.count("steps_total")
    metrics.count("steps_total", 4)
    metrics.gauge("running", 3)
    metrics.gauge("running", 2)
    assert metrics.snapshot() == {"steps_total": 5, "running": 2}


def test_timers_keep_number_sum_last_and_longest(monkeypatch):
    clock = iter([10.0, 12.0, 20.0, 20.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    metrics = Metrics()
    for _ in range(2):
        with metrics.timer("step_seconds"):
            pass
    assert metrics.snapshot() == {"step_seconds": {"num": 2, "total": 2.5, "last": 0.5, "max": 2.0}}


def test_a_timer_records_a_block_that_raises():
    metrics = Metrics()
    with pytest.raises(KeyError), metrics.timer("step_seconds"):
        raise KeyError
    assert metrics.snapshot()["step_seconds"]["num"] == 1


def test_a_snapshot_does_not_change_afterwards():
    metrics = Metrics()
    metrics.count("a")
    metrics.observe("b", 1.0)
    before = metrics.snapshot()
    metrics.count("a")
    metrics.observe("b", 1.0)
    assert before["a"] == 1 and before["b"]["num"] == 1


def test_a_name_has_one_kind_and_a_counter_one_direction():
    metrics = Metrics()
    metrics.count("a")
    with pytest.raises(ValueError, match="a: is in use"):
        metrics.gauge("a", 1)
    with pytest.raises(ValueError, match="a: got -1"):
        metrics.count("a", -1)


def test_threads_lose_no_counts():
    metrics = Metrics()
    threads = [threading.Thread(target=lambda: [metrics.count("a") for _ in range(2000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.snapshot() == {"a": 8000}
