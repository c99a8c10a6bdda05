"""One module per subcommand, each with a docstring (its help text), `add_arguments(parser)`, `run(args)`."""


class CommandError(Exception):
    """A failure that the reader can act on: one sentence with the way out, printed without a traceback."""


def in_words(error: OSError, path: object) -> str:
    """What the system refused, without its number. `path`: what was worked on, if the error names nothing."""
    if error.strerror is None:  # one of ours, in words already
        return str(error)
    return f"{error.filename or path}: {error.strerror.lower()}"
