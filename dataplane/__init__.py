"""QUIC ingress for an inference engine: fixed slots, one compare-and-swap, a verdict at once."""

__version__ = "0.1.0"
