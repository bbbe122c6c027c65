"""The wire formats: each turns stream events into ingress calls and writes answers."""
