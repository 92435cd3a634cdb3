"""`python -m pagedec`."""

from pagedec.cli.main import command

if __name__ == "__main__":
    command()
