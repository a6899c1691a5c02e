"""`python -m afina.cli`, for launchers that start a module (torchrun -m)."""

import atexit
import os
import sys

from afina.cli import main


def one_of_several() -> None:
    """Does what the command line says, and ends this process without taking the interpreter down.

    torch's threads that talk to the other processes may still let go of their tensors then, and a thread that asks for
    the interpreter's lock while it is taken down aborts the process: a run that is done would end as a failure.
    """
    try:
        status = main()
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        status = end.code or 0
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        one_of_several()
    sys.exit(main())
