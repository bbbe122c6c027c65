"""The load generator: many connections, closed or open loop, every answer counted and timed."""

from dataplane.load.loop import Load, Server

__all__ = ["Load", "Server"]
