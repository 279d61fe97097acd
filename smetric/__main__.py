"""`python -m smetric` is `smetric`."""

from smetric.cli import main

main(prog_name="smetric")
