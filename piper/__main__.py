"""``python -m piper``."""

from piper.cli import main

main()
