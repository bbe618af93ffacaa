"""Proxy of a teacher service. ``proxy`` is its loop, ``dispatch`` assigns requests, ``status_tracker`` its status."""

from teacher.proxy.proxy import Proxy

__all__ = ["Proxy"]
