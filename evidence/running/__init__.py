"""What experiments are run with: cells and stages, files, machine."""
