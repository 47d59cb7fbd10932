"""Where the command begins: quiet at Ctrl-C, even while its modules are loaded."""

import sys


def main() -> int:
    """Run the command; return its exit status."""
    try:
        from waitfold import cli

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
