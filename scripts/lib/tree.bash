# Programs of a tree of Debian packages (deb-root.py), which is not the machine's own system. To be sourced; `dir` is the folder of the tree,
# `root` the tree itself.

# Programs run under the tree's own loader, and start each other by name (the compiler its assembler): each becomes a script of the same name
# that starts the program beside it. What follows the root are patterns of names that stay as they are.
wrap_programs() {
  local program folder kept=() folders=()
  for program in "$@"; do kept+=(! -name "$program"); done
  # Not every tree has all of them, and `find` would fail for one.
  for folder in "$root"/usr/{bin,libexec,lib/gcc}; do
    if [[ -d $folder ]]; then folders+=("$folder"); fi
  done
  find "${folders[@]}" -type f ! -name '*.so*' ! -name '*.elf' "${kept[@]}" 2> /dev/null |
    while IFS= read -r program; do
      [[ $(LC_ALL=C head -c 4 "$program" | tr -d '\0') == $'\x7fELF' ]] || continue
      mv "$program" "$program.elf"
      printf '#!/bin/sh\nexec "%s/loader" --library-path "%s" --argv0 "$0" "%s" "$@"\n' "$dir" "$dir/library-path" "$program.elf" > "$program"
      chmod 755 "$program"
    done
}

# For machines whose C library is newer than the tree's: links to everything but the C library. Writes which one the tree has.
link_libraries() {
  local library
  mkdir -p "$dir/libraries"
  for library in "$root"/usr/lib/x86_64-linux-gnu/*.so*; do
    case ${library##*/} in
      ld-* | lib[cm].so* | libmvec.* | libdl.* | libpthread.* | librt.* | libresolv.* | libutil.* | libanl.* | libnss_* | \
        libBrokenLocale.* | libthread_db.* | libc_malloc_debug.* | libnsl.* | libmemusage.* | libpcprofile.*) ;;
      *) ln -sfn "$library" "$dir/libraries/${library##*/}" ;;
    esac
  done
  sed -n 's/^libc6 2\.\([0-9]*\).*/\1/p' "$root/packages" > "$dir/ready"
}

# A program that was built for a newer C library than the tree's, as macros of crates are here, needs that one; so does who loads it.
choose_loader() {
  local tree_glibc host_glibc loader=$root/lib64/ld-linux-x86-64.so.2 libraries=$root/usr/lib/x86_64-linux-gnu
  read -r tree_glibc < "$dir/ready"
  host_glibc=$(getconf GNU_LIBC_VERSION 2> /dev/null) || host_glibc=
  host_glibc=${host_glibc#glibc 2.}
  if [[ $host_glibc =~ ^[0-9]+$ ]] && ((host_glibc > tree_glibc)) && [[ -x /lib64/ld-linux-x86-64.so.2 ]]; then
    loader=/lib64/ld-linux-x86-64.so.2 libraries=$dir/libraries
  fi
  ln -sfn "$loader" "$dir/loader"
  ln -sfn "$libraries" "$dir/library-path"
}
