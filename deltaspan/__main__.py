"""`python -m deltaspan`: the command line, from a checkout too."""

from deltaspan.cli import main

if __name__ == "__main__":
    main()
