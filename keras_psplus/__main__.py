"""`python -m keras_psplus` is the command `keras-psplus`."""

import sys

from keras_psplus.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
