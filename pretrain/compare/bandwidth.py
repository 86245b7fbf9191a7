"""Compute utilisation against the bandwidth between processes, by a model: an update computes for C seconds and sends b bytes, which take
8·b/B seconds at B bits per second, none of it hidden: U = C / (C + 8·b/B). So it is what a network at least allows. Charles et al. 2025
(arXiv 2503.09799, appendix) draw such curves for local methods; there as here latency is left out."""

LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
GBIT = 1e9


def utilisation(compute_seconds: float, sent: float, bits_per_second: float) -> float:
    return compute_seconds / (compute_seconds + 8 * sent / bits_per_second)


def needed(compute_seconds: float, sent: float, level: float) -> float:
    """Bits per second at which utilisation is `level`."""
    return 8 * sent * level / (compute_seconds * (1 - level))
