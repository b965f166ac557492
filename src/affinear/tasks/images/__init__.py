"""What tasks on images share: opening, decoding, augmenting."""
