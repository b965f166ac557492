"""What can be trained, one folder each: data, networks, loss, metrics, published recipes."""

from .. import train as train  # the engine first, which still knows the one task there is
