"""`python -m blockscale.cli` is the `blockscale` command."""

from blockscale.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
