"""MathJax for the site: fetched from the npm registry, checked by hash, kept in `build/` for the next time.

Its pages must ask no other machine for anything, so the files that they need lie beside them.
"""

import base64
import hashlib
import io
import os
import re
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

VERSION = "3.2.2"
SHA512 = "Bt+SSVU8eBG27zChVewOicYs7Xsdt40qm4+UpHyX7k0/O9NliPc+x77k1/FEsPsjKPZGJvtRZM1vO+geW0OhGw=="
# Of the package's 15 MB a page loads the script, the fonts, and rarely an extension that a formula asks for.
NEEDED = re.compile(r"package/(es5/(?:tex-chtml\.js|output/chtml/fonts/.+|input/tex/extensions/.+))")
TIMEOUT_S = 60


class MathJaxError(Exception):
    """One sentence for the reader: why there is no MathJax, and the way out."""


def registry() -> str:
    """The npm registry that this user has set: in the environment, in ~/.npmrc, or npm's own."""
    for name in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
        if os.environ.get(name):
            return os.environ[name].rstrip("/")
    settings = Path.home() / ".npmrc"
    text = settings.read_text() if settings.exists() else ""
    found = re.search(r"^\s*registry\s*=\s*(\S+)", text, re.MULTILINE)
    return (found[1] if found else "https://registry.npmjs.org").rstrip("/")


def check(data: bytes, origin: str) -> None:
    """Raises MathJaxError unless `data` is the package that is pinned here."""
    found = base64.b64encode(hashlib.sha512(data).digest()).decode()
    if found != SHA512:
        raise MathJaxError(
            f"{origin} is not the tested MathJax {VERSION}: its SHA-512 is {found}, not {SHA512}. Delete it "
            "if it is a file, and look what your registry (npm config get registry) hands out."
        )


def package(folder: Path) -> bytes:
    """The npm package, from `folder` when it lies there already. Raises MathJaxError when out of reach."""
    kept = folder / f"mathjax-{VERSION}.tgz"
    if not kept.exists():
        url = f"{registry()}/mathjax/-/{kept.name}"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
                data = response.read()
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise MathJaxError(
                f"MathJax could not be fetched from {url} ({error}): set npm_config_registry to a registry "
                f"that you reach, or put the file there yourself: {kept}."
            ) from None
        check(data, url)
        folder.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(data)
    data = kept.read_bytes()
    check(data, str(kept))
    return data


def unpack(data: bytes, target: Path) -> None:
    """Write what a page needs into `target`: `target/es5/tex-chtml.js` and what it loads."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            wanted = NEEDED.fullmatch(member.name)
            content = archive.extractfile(member) if wanted and member.isfile() else None
            if wanted and content and ".." not in wanted[1]:
                file = target / wanted[1]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content.read())
