"""Figures as Prometheus samples."""

import re

from scheduler.stats import Stats


def test_every_sample_is_well_formed_whatever_the_replica_is_called() -> None:
    stats = Stats('we"ird\\name/0')
    stats.requests["ok"] += 2
    stats.stale["rank"] += 1
    stats.step_failures["oom"] += 1
    samples = stats.samples(7, now=0.0)
    assert samples.incarnation == 7
    for name in samples.values:
        assert re.fullmatch(r'bouquet_scheduler_[a-z_]+\{replica="we\\"ird\\\\name/0"(,[a-z]+="[^"]+")?\}', name), name
    labels = 'replica="we\\"ird\\\\name/0"'
    assert samples.values[f'bouquet_scheduler_requests_total{{{labels},outcome="ok"}}'] == 2.0


def test_the_age_of_the_last_forward_pass() -> None:
    stats = Stats("r")
    assert stats.forward_age_ms(10.0) == -1
    stats.last_forward = 9.5
    assert stats.forward_age_ms(10.0) == 500
