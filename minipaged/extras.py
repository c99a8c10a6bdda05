"""How an extra of pyproject.toml is installed: what every message says that misses one.

From the repository's folder and by its pins. On PyPI the name minipaged is nobody's, or somebody else's: no
message may send anybody there.
"""

# Extras that a make command installs; the others have none.
COMMANDS = {"course": "make setup", "scale": "make scale", "serve": "make setup", "teach": "make teach"}


def how_to_install(extra: str) -> str:
    """The way to an extra, as in ``run `make scale` in the repository's folder``."""
    pip = f'pip install -c constraints.txt -e ".[{extra}]"'
    return f"run `{COMMANDS.get(extra, pip)}` in the repository's folder"
