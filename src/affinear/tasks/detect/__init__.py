"""Detection: objects found in images, as boxes and masks."""
