"""The bare ASGI application with binary ids on hypercorn, the ASGI server that speaks HTTP/3."""

from bench.peers.uvicorn_binary import app

__all__ = ["app"]
