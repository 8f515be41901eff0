"""Which settings a new version of a function does not take over."""

from overwinter.core.function import Settings, reset_settings


def test_settings_that_differ_from_their_default_in_the_former_version_alone_are_reset():
    former = Settings(slo_ms=80.0, max_batch=8, queue_limit=10, device="pool")
    new = Settings(slo_ms=90.0, queue_limit=10, threads=2)
    assert reset_settings(former, new) == ["max_batch", "device"]
    assert reset_settings(new, new) == []
    assert reset_settings(Settings(), former) == []
