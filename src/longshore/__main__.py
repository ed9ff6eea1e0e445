"""`python -m longshore` is the command `longshore`."""

from longshore.deploy.__main__ import main

if __name__ == "__main__":
    main()
