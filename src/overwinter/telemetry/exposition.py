"""Formats families of Prometheus metrics."""

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from overwinter.telemetry.histogram import Histogram

PREFIX = "overwinter_"
Labels = Sequence[str]
Sample = tuple[Labels, float]


def counter(name: str, help_text: str, labels: Labels, samples: Iterable[Sample]) -> Metric:
    """Format a family of counters."""
    return _filled(CounterMetricFamily(PREFIX + name, help_text, labels=labels), samples)


def gauge(name: str, help_text: str, labels: Labels, samples: Iterable[Sample]) -> Metric:
    """Format a family of gauges."""
    return _filled(GaugeMetricFamily(PREFIX + name, help_text, labels=labels), samples)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, samples: Iterable[Sample]) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def histogram(name: str, help_text: str, labels: Labels, samples: Iterable[tuple[Labels, Histogram]]) -> Metric:
    """Format a family of histograms."""
    family = HistogramMetricFamily(PREFIX + name, help_text, labels=labels)
    for values, each in samples:
        # Copy the counts once, because the event loop's thread continues to count.
        counts, total, below = list(each.counts), each.total, 0
        buckets = []
        for bound, count in zip([*each.bounds, None], counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound is None else str(bound), below))
        family.add_metric(values, buckets, total)
    return family
