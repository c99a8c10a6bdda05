"""One module per subcommand, each with a docstring (its help text), `add_arguments(parser)`, `run(args)`."""


class CommandError(Exception):
    """A failure that the reader can act on: one sentence with the way out, printed without a traceback."""
