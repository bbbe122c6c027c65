"""An engine in Python that gives each prompt back: `python echo.py runtime.sock`."""

import sys

from dataplane.runtime import AttachError, DetachedError, Finish, Manifest, Runtime, Taken, attach

MANIFEST = Manifest(model="echo", slots=4, context=1024, max_output=512, vocab_size=49152)
CHUNK = 16


def answer(runtime: Runtime, request: Taken) -> None:
    ids = request.tokens[: request.max_output]  # read in place: nothing was copied yet
    for start in range(0, len(ids), CHUNK):
        if request.cancelled:  # nobody waits for the rest
            break
        request.emit(ids[start : start + CHUNK])
        runtime.step()
    request.finish(Finish.LENGTH if len(ids) == request.max_output else Finish.STOP)


def main(path: str) -> str:
    try:
        with attach(path, MANIFEST) as runtime:
            runtime.ready()  # all is allocated: from now on the daemon serves
            while True:
                for request in runtime.take():
                    answer(runtime, request)
    except (AttachError, DetachedError) as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
