"""The operator's benchmark: what is timed, against what, how, and which bars it has to clear. `affinear bench ops`."""
