"""Images with a class each, in every layout that they are published in: from `--data` to two halves by number."""
