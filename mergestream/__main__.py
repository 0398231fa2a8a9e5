import sys

from mergestream.cli import main

sys.exit(main())
