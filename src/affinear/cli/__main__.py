"""`python -m affinear.cli`, which launchers of many processes call."""

from . import main

if __name__ == "__main__":
    main()
