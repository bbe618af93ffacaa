"""The one address of a service: `proxy` is the loop, `dispatch` what it decides, `overview` what it says of itself."""

from teacher.proxy.proxy import Proxy

__all__ = ["Proxy"]
