"""Prometheus metrics as a scraper reads them."""

from prometheus_client.parser import text_string_to_metric_families

type Labels = tuple[tuple[str, str], ...]


def read_exposition(text: str) -> dict[str, dict[Labels, float]]:
    """Values by metric and labels.

    Raises:
        ValueError: a line that is none of the format.
        AssertionError: a metric without help, or labels that come twice.
    """
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = tuple(sample.labels.items())
            assert labels not in found.setdefault(sample.name, {}), sample
            found[sample.name][labels] = sample.value
    return found
