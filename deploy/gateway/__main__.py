"""`python -m longshore.deploy.gateway CONFIG.json`: the gateway as a process."""

import sys

from longshore.deploy.gateway.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
