"""`python -m ifbbench` is the `ifbbench` command."""

from ifbbench.cli.main import main

if __name__ == "__main__":
    main(prog_name="ifbbench")
