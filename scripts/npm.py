"""Packages of the npm registry that pages carry: fetched, checked by hash, kept in `build/`.

The pages of the site and the slides must ask no other machine for anything: what they need lies beside them.
"""

import base64
import hashlib
import io
import os
import re
import tarfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 60


class NpmError(Exception):
    """One sentence for the reader: why a package is not there, and the way out."""


@dataclass(frozen=True)
class Package:
    """One version of a package.

    sha512: of its archive, in base64, as npm prints it. needed: matches the members that a page loads; its
    first group is where they are laid.
    """

    name: str
    version: str
    sha512: str
    needed: re.Pattern[str]


# Of the package's 15 MB a page loads the script, the fonts, and rarely an extension that a formula asks for.
MATHJAX = Package(
    "mathjax",
    "3.2.2",
    "Bt+SSVU8eBG27zChVewOicYs7Xsdt40qm4+UpHyX7k0/O9NliPc+x77k1/FEsPsjKPZGJvtRZM1vO+geW0OhGw==",
    re.compile(r"package/(es5/(?:tex-chtml\.js|output/chtml/fonts/.+|input/tex/extensions/.+))"),
)
REVEAL = Package(
    "reveal.js",
    "5.1.0",
    "KDt7m0+xwKV6nAZt4CNPVFBf42sTKRQapg0bGGKB5PKO5XvChnMfwlZkybydHiQJ7p5+6LbHKRGrhXODdoNIaA==",
    re.compile(r"package/(dist/(?:reveal\.js|reveal\.css|reset\.css)|LICENSE)"),
)


def registry() -> str:
    """The npm registry that this user has set: in the environment, in ~/.npmrc, or npm's own."""
    for name in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
        if os.environ.get(name):
            return os.environ[name].rstrip("/")
    settings = Path.home() / ".npmrc"
    text = settings.read_text() if settings.exists() else ""
    found = re.search(r"^\s*registry\s*=\s*(\S+)", text, re.MULTILINE)
    return (found[1] if found else "https://registry.npmjs.org").rstrip("/")


def check(package: Package, data: bytes, origin: str) -> None:
    """Raises NpmError unless `data` is the version that is pinned here."""
    found = base64.b64encode(hashlib.sha512(data).digest()).decode()
    if found != package.sha512:
        raise NpmError(
            f"{origin} is not the tested {package.name} {package.version}: its SHA-512 is {found}, not "
            f"{package.sha512}. Delete it if it is a file, and look what your registry "
            "(npm config get registry) hands out."
        )


def fetch(package: Package, folder: Path) -> bytes:
    """The archive, from `folder` when it lies there already. Raises NpmError when it is out of reach."""
    kept = folder / f"{package.name}-{package.version}.tgz"
    if not kept.exists():
        url = f"{registry()}/{package.name}/-/{kept.name}"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
                data = response.read()
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise NpmError(
                f"{package.name} could not be fetched from {url} ({error}): set npm_config_registry to a "
                f"registry that you reach, or put the file there yourself: {kept}."
            ) from None
        check(package, data, url)
        folder.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(data)
    data = kept.read_bytes()
    check(package, data, str(kept))
    return data


def unpack(package: Package, data: bytes, target: Path) -> None:
    """Write what a page needs into `target`: of MathJax `target/es5/tex-chtml.js` and what it loads."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            wanted = package.needed.fullmatch(member.name)
            content = archive.extractfile(member) if wanted and member.isfile() else None
            if wanted and content and ".." not in wanted[1]:
                file = target / wanted[1]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content.read())
