"""Where it runs: configuration, command line, launching, job submission."""
