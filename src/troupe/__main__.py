"""`python -m troupe`: the same as the `troupe` command."""

from troupe.cluster.cli import main

main()
