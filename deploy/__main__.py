"""`python -m longshore.deploy` is the `longshore` command."""

from longshore.deploy.cli.main import main

if __name__ == "__main__":
    main()
