#!/bin/sh
# Installs Kiln for this user, from a folder or a web address that holds what `cargo xtask release` makes.
#
#     sh install.sh FROM                 into ~/.local: the command ~/.local/bin/kiln, man pages, completions
#     sh install.sh FROM --prefix DIR    into DIR
#     sh install.sh --remove [--prefix DIR]
#
# FROM is a folder, or an address that starts with https:// (http:// only on this machine). The archive is checked against
# SHA256SUMS before anything is written. Set KILN_SHA256 to a checksum that you have from elsewhere to check it against that, too.
set -eu

fail() {
  printf 'error: %s\n' "$1" >&2
  [ $# -lt 2 ] || printf 'hint: %s\n' "$2" >&2
  exit 1
}

usage() {
  sed -n '4,6s/^# *//p' "$0" >&2
  exit 2
}

# The commands `fetch NAME FILE` and `sum FILE` for this machine.
fetch() {
  case $from in
    https://* | http://127.0.0.1[:/]* | http://localhost[:/]*)
      if command -v curl > /dev/null; then
        curl -fsSL -o "$2" "$from/$1"
      elif command -v wget > /dev/null; then
        wget -q -O "$2" "$from/$1"
      else
        fail 'neither curl nor wget is here' 'install one of them, or download the files and give their folder'
      fi ;;
    http://*) fail "$from is not encrypted" 'use https://, or download the files and give their folder' ;;
    *) cp "$from/$1" "$2" ;;
  esac || fail "cannot get $from/$1" 'FROM is a folder or an address that holds SHA256SUMS and the archives'
}

sum() {
  if command -v sha256sum > /dev/null; then
    sha256sum "$1" | cut -d ' ' -f 1
  elif command -v shasum > /dev/null; then
    shasum -a 256 "$1" | cut -d ' ' -f 1
  else
    fail 'neither sha256sum nor shasum is here, so the archive cannot be checked' 'install coreutils'
  fi
}

# Only what Kiln is built for: anything else would fail later and less clearly.
check_system() {
  system=$(uname -s) machine=$(uname -m)
  [ "$system" = Linux ] || fail "there is no archive for $system, only for Linux" 'build Kiln from source: docs/install.md'
  case $machine in
    x86_64 | amd64) machine=x86_64 ;;
    aarch64 | arm64) machine=aarch64 ;;
    *) fail "there is no archive for $machine, only for x86_64 and aarch64" 'build Kiln from source: docs/install.md' ;;
  esac
  libc=$(getconf GNU_LIBC_VERSION 2> /dev/null || true)
  [ -n "$libc" ] || fail 'this system has no glibc (Alpine has musl)' 'use the container of deploy/Dockerfile'
  command -v xz > /dev/null || fail 'xz is not here, so the archive cannot be unpacked' 'install xz-utils (or xz)'
}

# Removes exactly the files that were installed, then the folders that are empty without them.
remove() {
  [ -f "$list" ] || fail "no list of installed files at $list" 'Kiln was not installed there by this script; --prefix names another folder'
  while IFS= read -r path; do
    rm -f "$prefix/$path"
  done < "$list"
  rm -f "$list"
  for folder in share/doc/kiln/examples share/doc/kiln share/doc share/man/man1 share/man share/bash-completion/completions \
    share/bash-completion share/zsh/site-functions share/zsh share/fish/vendor_completions.d share/fish share/kiln-install share bin; do
    rmdir "$prefix/$folder" 2> /dev/null || true
  done
}

install() {
  check_system
  fetch SHA256SUMS "$work/SHA256SUMS"
  line=$(grep -E "^[0-9a-f]{64}  kiln-[0-9][^ /]*-$machine-linux\.tar\.xz\$" "$work/SHA256SUMS" || true)
  [ "$(printf '%s\n' "$line" | grep -c .)" = 1 ] ||
    fail "SHA256SUMS of $from does not name exactly one kiln-VERSION-$machine-linux.tar.xz"
  want=${line%% *} name=${line##* }
  fetch "$name" "$work/$name"
  got=$(sum "$work/$name")
  [ "$got" = "$want" ] || fail "$name is damaged: SHA-256 is $got, SHA256SUMS says $want. Nothing was installed" 'download it again'
  [ -z "${KILN_SHA256:-}" ] || [ "$got" = "$KILN_SHA256" ] ||
    fail "SHA-256 of $name is $got, KILN_SHA256 says $KILN_SHA256. Nothing was installed"
  tar -xJf "$work/$name" -C "$work"
  top=$work/${name%.tar.xz}
  said=$("$top/bin/kiln" --version 2>&1) ||
    fail "the program does not start here: $said" "it was built for a newer system than this one ($libc); build Kiln from source"
  # What an earlier version left and this one does not bring goes away.
  [ ! -f "$list" ] || remove
  (cd "$top" && find . -type f | sed 's|^\./||' | LC_ALL=C sort) > "$work/files"
  while IFS= read -r path; do
    mkdir -p "$prefix/$(dirname "$path")"
    # Moved into place, so that a running program keeps its own file.
    cp -p "$top/$path" "$prefix/$path.new" && mv -f "$prefix/$path.new" "$prefix/$path"
  done < "$work/files"
  mkdir -p "$(dirname "$list")"
  cp "$work/files" "$list"
  printf '%s is installed: %s/bin/kiln\n' "$said" "$prefix"
  case :$PATH: in
    *":$prefix/bin:"*) ;;
    # shellcheck disable=SC2016 # for the reader's shell
    *) printf 'note: add it to your PATH: export PATH="%s/bin:$PATH"\n' "$prefix" ;;
  esac
}

from='' mode=install prefix=''
while [ $# -gt 0 ]; do
  case $1 in
    --prefix) [ $# -ge 2 ] || usage; prefix=$2; shift ;;
    --remove) mode=remove ;;
    -*) usage ;;
    *) [ -z "$from" ] || usage; from=${1%/} ;;
  esac
  shift
done
[ -n "$prefix" ] || prefix=${HOME:?}/.local
list=$prefix/share/kiln-install/files
if [ "$mode" = remove ]; then
  [ -z "$from" ] || usage
  remove
  printf 'removed from %s\n' "$prefix"
  exit
fi
[ -n "$from" ] || usage
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
install
