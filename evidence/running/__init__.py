"""What experiments are run with: cells, their options and their telling; stages and steps; files, machine."""
