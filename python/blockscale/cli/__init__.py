"""The `blockscale` command; `blockscale.cli.main` lists its subcommands, one module each."""
