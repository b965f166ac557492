"""The microscope: a page on this machine that shows what one patch of an image attends to, mechanism by mechanism."""

from affinear.lens.microscope.desk import Network
from affinear.lens.microscope.server import make_server, serve

__all__ = ["Network", "make_server", "serve"]
