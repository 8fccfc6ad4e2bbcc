"""``python -m piper``."""

from piper.cli.app import main

main()
