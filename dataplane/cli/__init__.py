"""The command line; `dataplane.cli.main` is where each command's flags stand."""
