"""`python -m pagedec`."""

from pagedec.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
