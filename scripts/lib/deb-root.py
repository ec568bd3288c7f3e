#!/usr/bin/env python3
"""Unpacks Debian packages with their dependencies into a folder, without root and without touching the system.

    scripts/lib/deb-root.py [--without PATTERN]... [--except PACKAGE]... DIR SUITE[,SUITE...] PACKAGE[:ARCHITECTURE][>=VERSION]...

A later suite wins where it has the package. Only Depends and Pre-Depends are followed, and no maintainer script runs. A
package of another architecture than the machine's comes alone: it is there to be linked with, not to run.
The mirror is the one the machine's own apt uses; DEBIAN_MIRROR overrides it. Each package is checked against the SHA-256
sums of the mirror's index, and the index against Debian's signature where gpgv and Debian's keys are installed.

DIR appears in one step when everything is in place. Downloads wait in DIR.debs until then, so a run that was cut off
goes on where it stopped; two runs at once wait for each other. DIR/packages lists what was unpacked.
"""
import argparse
import fcntl
import fnmatch
import hashlib
import http.client
import io
import lzma
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request

ARCHITECTURES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
ATTEMPTS = 3
TIMEOUT_S = 60


class Failure(Exception):
    """What went wrong, and a hint how to go on."""

    def __init__(self, message, hint):
        super().__init__(message)
        self.hint = hint


def say(text):
    print(f"deb-root: {text}", file=sys.stderr, flush=True)


def output_of(*command):
    """Standard output of a program, or nothing where the program is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


# --- the mirror -------------------------------------------------------------------------------------------------------


def mirrors_of_sources(text):
    """Addresses of Debian archives in apt's source files, in both the one-line and the deb822 form."""
    found = []
    for line in text.splitlines():
        one_line = re.match(r"deb\s+(?:\[[^]]*\]\s*)?(\S+)\s", line)
        field = re.match(r"URIs:(.*)", line, re.I)
        found += [one_line[1]] if one_line else field[1].split() if field else []
    # Only the path tells a Debian archive from others here: `.../debian`, not `.../debian-security` or `.../ubuntu`.
    return [uri.rstrip("/") for uri in found if re.match(r"(https?|file):.*/debian/?$", uri)]


def mirrors():
    """Debian archives that this machine knows, best first."""
    if os.environ.get("DEBIAN_MIRROR"):
        return [os.environ["DEBIAN_MIRROR"].rstrip("/")]
    found = []
    for row in output_of("apt-get", "indextargets", "--format", "$(ORIGIN)|$(LABEL)|$(REPO_URI)").splitlines():
        origin, label, uri = (row.split("|") + ["", ""])[:3]
        if (origin, label) == ("Debian", "Debian"):
            found.append(uri.rstrip("/"))
    # Before the first `apt-get update`, and where apt itself is missing, the source files still name the mirror.
    sources = ["/etc/apt/sources.list"]
    if os.path.isdir("/etc/apt/sources.list.d"):
        sources += sorted(e.path for e in os.scandir("/etc/apt/sources.list.d") if e.name.endswith((".list", ".sources")))
    for path in sources:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                found += mirrors_of_sources(file.read())
        except OSError:
            continue
    if not found:
        raise Failure("no Debian mirror is configured on this machine", "set DEBIAN_MIRROR=http://HOST/debian")
    return list(dict.fromkeys(found))


def use_apts_proxy():
    """Goes through apt's proxy where the environment names none: behind it there may be no other way out."""
    for scheme in ("http", "https"):
        proxy = re.search(r'"(\S+)";', output_of("apt-config", "dump", f"Acquire::{scheme}::Proxy"))
        if proxy and proxy[1] != "DIRECT" and not os.environ.get(f"{scheme}_proxy"):
            os.environ[f"{scheme}_proxy"] = proxy[1]


def fetch(url):
    """The bytes behind an address; tries again when the connection breaks, not when the server says no."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
                return reply.read()
        except (OSError, http.client.HTTPException) as error:
            if attempt == ATTEMPTS or isinstance(error, urllib.error.HTTPError) and error.code < 500:
                reason = getattr(error, "reason", None) or error
                raise Failure(f"cannot fetch {url}: {reason}", "check the network and proxy, or set DEBIAN_MIRROR") from error
            time.sleep(attempt)
    raise AssertionError("the last attempt should return or raise")


# --- the index --------------------------------------------------------------------------------------------------------


def signed_text(release, url):
    """The text of an InRelease file, checked against Debian's keys where this machine can do that."""
    if not shutil.which("gpgv") or not os.path.exists(KEYRING):
        say(f"note: no gpgv or no {KEYRING}; the signature of {url} is not checked")
        return release
    check = subprocess.run(
        ["gpgv", "--keyring", KEYRING, "--status-fd", "2", "--output", "-"], input=release, capture_output=True, check=False
    )
    status = check.stderr.decode(errors="replace")
    if "BADSIG" in status or "NODATA" in status:
        raise Failure(f"{url} is not what Debian signed", "use another mirror: set DEBIAN_MIRROR")
    if "GOODSIG" not in status:
        say(f"note: the keys of {KEYRING} do not cover {url}; its signature is not checked")
        return release
    return check.stdout


def packages_of(mirror, suite, architecture):
    """The package stanzas of one suite."""
    base, path = f"{mirror}/dists/{suite}", f"main/binary-{architecture}/Packages.xz"
    release = signed_text(fetch(f"{base}/InRelease"), f"{base}/InRelease").decode()
    sums = re.search(rf"^ ([0-9a-f]{{64}})\s+\d+ {re.escape(path)}$", release, re.M)
    if not sums:
        raise Failure(f"{base} has no {path}", "the suite or the architecture is not on this mirror: set DEBIAN_MIRROR")
    data = fetch(f"{base}/{path}")
    if hashlib.sha256(data).hexdigest() != sums[1]:
        raise Failure(f"{base}/{path} does not match its InRelease", "the mirror is being updated: try again in some minutes")
    for stanza in lzma.decompress(data).decode().split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z0-9-]+): (.*)$", stanza, re.M))
        if "Package" in fields:
            yield fields


def index(mirror, suites, architecture):
    """Packages by name, and names of packages by what they provide."""
    packages, provides = {}, {}
    for suite in suites:
        say(f"reading {mirror} {suite} {architecture}")
        for fields in packages_of(mirror, suite, architecture):
            packages[fields["Package"]] = fields
            for clause in fields.get("Provides", "").split(","):
                name = clause.split("(")[0].strip()
                if name:
                    provides.setdefault(name, fields["Package"])
    return packages, provides


def package_of(packages, name):
    if name not in packages:
        raise Failure(f"no package {name} on this mirror", "use a full mirror: set DEBIAN_MIRROR")
    return packages[name]


def closure(packages, provides, wanted, unwanted):
    """The wanted packages and all they depend on; of alternatives, the first that exists."""
    chosen, todo = {}, list(wanted)
    while todo:
        name = todo.pop()
        name = name if name in packages else provides.get(name, name)
        if name in chosen or name in unwanted:
            continue
        chosen[name] = package_of(packages, name)
        for clause in ",".join(packages[name].get(f, "") for f in ("Pre-Depends", "Depends")).split(","):
            options = [re.split(r"[ (:]", option.strip())[0] for option in clause.split("|") if option.strip()]
            todo += [option for option in options if option in packages or option in provides][:1]
    return chosen


def numbers(version):
    """The leading numbers of a Debian version: 26.1.6 of `1:26.1.6-1~bpo13+1`."""
    return [int(n) for n in re.match(r"(?:\d+:)?(\d+(?:\.\d+)*)", version)[1].split(".")]


def check_versions(chosen, wanted):
    for name, least in wanted.items():
        if least and numbers(chosen[name]["Version"]) < numbers(least):
            raise Failure(f"{name} {chosen[name]['Version']} is older than {least}", "the mirror is out of date: set DEBIAN_MIRROR")


# --- downloading and unpacking ----------------------------------------------------------------------------------------


def download(mirror, fields, folder):
    """The package's file in `folder`; one that is there already and whole is used as it is."""
    path = os.path.join(folder, os.path.basename(fields["Filename"]))
    if os.path.exists(path):
        with open(path, "rb") as file:
            data = file.read()
        if hashlib.sha256(data).hexdigest() == fields["SHA256"]:
            return data
    url = f"{mirror}/{fields['Filename']}"
    data = fetch(url)
    if hashlib.sha256(data).hexdigest() != fields["SHA256"]:
        raise Failure(f"{url} is damaged: its SHA-256 is not the one in the index", "try again, or set DEBIAN_MIRROR")
    with open(path + ".part", "wb") as file:
        file.write(data)
    os.rename(path + ".part", path)
    return data


def data_archive(deb, name):
    """The file tree inside a package: the member `data.tar.*` of an `ar` archive."""
    at = 8
    while at + 60 <= len(deb):
        member, size = deb[at : at + 16].decode().strip().rstrip("/"), int(deb[at + 48 : at + 58])
        if member in ("data.tar", "data.tar.gz", "data.tar.xz"):
            return tarfile.open(fileobj=io.BytesIO(deb[at + 60 : at + 60 + size]))
        at += 60 + size + size % 2
    raise Failure(f"{name} is not packed as tar, gz or xz", "the package format has changed: please report this")


def unpack(deb, name, root, without):
    """Writes a package's files below `root`. Owners and special files are left out: nothing here runs as root."""
    with data_archive(deb, name) as archive:
        for member in archive:
            path = os.path.normpath(member.name)
            if path.split("/")[0] in ("bin", "lib", "lib64", "sbin"):
                path = f"usr/{path}"  # Debian's merged /usr, also for packages that do not know it yet.
            if path.startswith(("/", "..")) or any(fnmatch.fnmatchcase(path, pattern) for pattern in without):
                continue
            target = os.path.join(root, path)
            if member.isdir():
                os.makedirs(target, exist_ok=True)
                continue
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if os.path.lexists(target):
                os.remove(target)
            if member.issym():
                os.symlink(member.linkname, target)
            elif member.islnk():
                os.link(os.path.join(root, os.path.normpath(member.linkname)), target)
            elif member.isreg():
                with archive.extractfile(member) as source, open(target, "wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                os.chmod(target, 0o755 if member.mode & 0o111 else 0o644)


def first_usable(candidates, suite):
    """The first mirror that answers for the suite."""
    for place, mirror in enumerate(candidates, 1):
        try:
            fetch(f"{mirror}/dists/{suite}/InRelease")
            return mirror
        except Failure as failure:
            if place == len(candidates):
                raise
            say(f"note: {failure}; trying the next mirror")
    raise AssertionError("there should be a candidate")


def choose(mirror, suites, own, wanted, unwanted):
    """The packages to unpack, by name; those of another architecture than the machine's are called NAME:ARCHITECTURE."""
    chosen = {}
    for architecture in [own, *sorted({name.partition(":")[2] for name in wanted} - {"", own})]:
        names = [name.partition(":")[0] for name in wanted if (name.partition(":")[2] or own) == architecture]
        packages, provides = index(mirror, suites, architecture)
        if architecture == own:
            chosen.update(closure(packages, provides, names, unwanted))
        else:
            chosen.update((f"{name}:{architecture}", package_of(packages, name)) for name in names)
    return chosen


def build(root, suites, wanted, without, unwanted):
    """Makes the folder, unless it is there."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        known = "amd64 (x86_64) and arm64 (aarch64)"
        raise Failure(f"no packages for a {machine} machine", f"only {known} are supported")
    use_apts_proxy()
    mirror = first_usable(mirrors(), suites[0])
    chosen = choose(mirror, suites, ARCHITECTURES[machine], wanted, unwanted)
    check_versions(chosen, wanted)
    debs, unfinished = f"{root}.debs", f"{root}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    os.makedirs(debs, exist_ok=True)
    for top in ("bin", "lib", "lib64", "sbin"):
        os.makedirs(f"{unfinished}/usr/{top}")
        os.symlink(f"usr/{top}", f"{unfinished}/{top}")
    for place, (name, fields) in enumerate(sorted(chosen.items()), 1):
        say(f"[{place}/{len(chosen)}] {name} {fields['Version']} ({int(fields['Size']) / 1e6:.1f} MB)")
        unpack(download(mirror, fields, debs), name, unfinished, without)
    with open(f"{unfinished}/packages", "w", encoding="utf-8") as file:
        file.writelines(f"{name} {fields['Version']} {fields['SHA256']}\n" for name, fields in sorted(chosen.items()))
    os.rename(unfinished, root)
    shutil.rmtree(debs, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without", metavar="PATTERN", action="append", default=[], help="files not to unpack, as usr/share/doc/*")
    parser.add_argument("--except", metavar="PACKAGE", action="append", default=[], dest="unwanted", help="what others depend on and is not needed here")
    parser.add_argument("dir", metavar="DIR")
    parser.add_argument("suites", metavar="SUITE[,SUITE...]")
    parser.add_argument("packages", metavar="PACKAGE[:ARCHITECTURE][>=VERSION]", nargs="+")
    args = parser.parse_args()
    root = os.path.abspath(args.dir)
    wanted = {name: least for name, _, least in (package.partition(">=") for package in args.packages)}
    try:
        os.makedirs(os.path.dirname(root), exist_ok=True)
        with open(f"{root}.lock", "w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another run is setting up {root}; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.isdir(root):
                build(root, args.suites.split(","), wanted, args.without, args.unwanted)
    except Failure as failure:
        sys.exit(f"deb-root: error: {failure}\nhint: {failure.hint}")
    except OSError as error:
        sys.exit(f"deb-root: error: {error}\nhint: {root} needs up to 2 GB on a writable disk")
    except KeyboardInterrupt:
        sys.exit("deb-root: interrupted; the next run goes on from here")


if __name__ == "__main__":
    main()
