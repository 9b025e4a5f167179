"""`python -m onefold` is the command `onefold`."""

from onefold.app.cli.main import command

if __name__ == "__main__":
    command()
